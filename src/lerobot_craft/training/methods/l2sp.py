"""L2-SP: pull every trained weight back to its value before fine-tuning (Li, Grandvalet and Davoine, 2018)."""

from typing import Any, ClassVar, override

from torch import Tensor

from lerobot_craft.training.methods.kept_tensors import keep_start, trained_parameters
from lerobot_craft.training.methods.method import Context, Cost, Method
from lerobot_craft.training.methods.pull import add_pull, require_plain_gradients


class L2SP(Method):
    """The task loss plus alpha/2 * |theta - theta_0|^2, with alpha = `--craft.l2sp_alpha`.

    Its gradient alpha (theta - theta_0) joins the task's before the two are clipped together. theta_0 is what the
    trained parameters were at step 0; with PEFT the adapters' own initial values.
    """

    name: ClassVar[str] = "l2sp"

    @override
    def start(self, context: Context) -> None:
        super().start(context)
        require_plain_gradients(context)
        trained = trained_parameters(context)
        self._kept = keep_start(context, trained)
        self._start = self._kept.like(trained) if context.resumed else [p.clone() for p in trained.values()]
        self._penalty: Tensor | None = None

    @override
    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self._penalty = add_pull(self.context.trained, self._start, self.context.config.l2sp_alpha)

    @override
    def metrics(self) -> dict[str, Any]:
        return {} if self._penalty is None else {"penalty": self._penalty.item()}

    @override
    def costs(self) -> list[Cost]:
        return [Cost("the weights before fine-tuning", sum(tensor.nbytes for tensor in self._start))]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"start_weights": self._kept.sha256}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept.require(state.get("start_weights"))
