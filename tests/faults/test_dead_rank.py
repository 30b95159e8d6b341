"""Ranks of `craft train`, of which one dies: the others stop at once, and say which."""

import subprocess
import sys
import time

import pytest

from tests.faults.runs import saved_steps
from tests.warm_process import environment, free_port

WITHIN = 60  # seconds; a rank that is there and does not answer is waited for two hours
KILL, RAISE = "tests.faults.injected:kill_around_step", "tests.faults.injected:raise_around_step"


@pytest.fixture
def ranks(run_flags, warm_process, tmp_path):
    """Function that runs ranks without a launcher, one of them with a fault, and returns what the others said."""

    def run(world, dying, fault):
        argv = ["train", *run_flags("smolvla", tmp_path / "run", steps=6, save_freq=2, batch_size=2)]
        variables = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        commands = [
            warm_process.start(
                argv,
                tmp_path / f"log_{rank}",
                prepare=fault if rank == dying else (),
                variables=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(world)
        ]
        commands[dying].wait()
        began = time.monotonic()
        survivors = [command for command in commands if command is not commands[dying]]
        for survivor in survivors:
            assert survivor.wait() == 2, survivor.log.read_text()[-3000:]
        assert time.monotonic() - began < WITHIN
        assert saved_steps(tmp_path / "run") == [2]
        return commands[dying].exit_code, *(survivor.log.read_text() for survivor in survivors)

    return run


@pytest.mark.slow  # two processes; the short form is tests/training/test_peers.py
@pytest.mark.timeout(600)
def test_a_rank_that_is_killed_is_named_by_the_other(ranks, tmp_path, tally):
    code, said = ranks(2, 1, (KILL, 4, False))
    assert code == -9
    last = said[said.rindex("craft: ") :]
    assert last.startswith("craft: rank 1 of 2 is gone without a word (killed, or out of memory), so rank 0 stops too;")
    assert f"go on from {tmp_path / 'run/checkpoints/000002'} by launching" in last
    tally.add("a rank that dies", "the other names it and stops")


@pytest.mark.slow  # two runs of two processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dying", "fault", "sentence"),
    [
        (0, (KILL, 4, False), "rank 0 of 2 is gone without a word (killed, or out of memory), so rank 1 stops too;"),
        (1, (RAISE, 4), "rank 1 of 2 stopped: a fault of this rank alone, so rank 0 stops too;"),
        (0, (RAISE, 4), "rank 0 of 2 stopped: a fault of this rank alone, so rank 1 stops too;"),
    ],
)
def test_whichever_rank_dies_the_other_names_it(dying, fault, sentence, ranks, tally):
    _, said = ranks(2, dying, fault)
    assert said[said.rindex("craft: ") :].startswith(f"craft: {sentence}")
    tally.add("a rank that dies", "the other names it and stops")


@pytest.mark.slow  # four processes
@pytest.mark.timeout(600)
def test_of_four_ranks_the_living_are_not_named(ranks, tally):
    code, *said = ranks(4, 1, (KILL, 4, False))
    assert code == -9
    for rank, text in zip((0, 2, 3), said, strict=True):
        silent = f"rank 1 of 4 is gone without a word (killed, or out of memory), so rank {rank} stops too;"
        assert text[text.rindex("craft: ") :].startswith(f"craft: {silent}")
    tally.add("a rank that dies", "the others name it and stop")


@pytest.mark.slow  # three processes that import lerobot
@pytest.mark.timeout(600)
def test_under_a_launcher_all_ranks_end_and_the_dead_one_is_named(run_flags, tmp_path, tally):
    flags = run_flags("smolvla", tmp_path / "run", steps=6, save_freq=2, batch_size=2)
    program = (
        "import os, sys\n"
        "from tests.faults.injected import kill_around_step\n"
        "from lerobot_craft.cli import main\n"
        "if os.environ['RANK'] == '1': kill_around_step(4, False)\n"
        "sys.exit(main(['train', *sys.argv[1:]]))\n"
    )
    script = tmp_path / "rank.py"
    script.write_text(program)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, *flags]
    done = subprocess.run(launch, env=environment(), capture_output=True, text=True)
    assert done.returncode != 0
    assert "rank 1 of 2" in done.stderr or "rank      : 1 (local_rank: 1)" in done.stderr
    tally.add("a rank that dies", "the launcher ends the other and names it")
