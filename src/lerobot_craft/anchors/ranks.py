"""The processes that `accelerate launch` started, or a single process."""

from dataclasses import dataclass

from lerobot_craft.lerobot_api.training import RANKS_WAIT, several_processes


@dataclass(frozen=True)
class Ranks:
    """This process and the number of processes."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def joined(cls, *, cpu: bool) -> "Ranks":
        """Join the other processes, if there are any."""
        if not several_processes():
            return cls()
        from accelerate import PartialState

        state = PartialState(cpu=cpu, timeout=RANKS_WAIT)
        return cls(state.process_index, state.num_processes)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the shared files."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()
