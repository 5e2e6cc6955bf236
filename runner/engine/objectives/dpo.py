"""Direct preference optimization: the losses of DPO, cDPO and IPO, with an optional likelihood term."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.errors import UserError
from common.settings import at_least, one_of, settings_class, within
from runner.engine.objectives.config import StageConfig, register_objective
from runner.engine.objectives.objective import Objective, Reference

if TYPE_CHECKING:
    from torch import Tensor, nn

    from data.batching.batch import Batch
    from models.language_model import LanguageModel
    from runner.engine.objectives.objective import LossSums


@register_objective("dpo")
@settings_class
class DpoConfig(StageConfig):
    # strength of the KL constraint: a larger value keeps the model closer to the reference
    beta: float = within("(0, inf)", 0.1, "a positive number")
    # sigmoid (DPO) or ipo (bounded margins, log-probabilities per token)
    loss_type: str = one_of("sigmoid", "ipo")
    # cDPO: fraction of pairs assumed to be labelled the wrong way round; sigmoid only
    label_smoothing: float = within("[0, 0.5)", 0.1)
    # weight of the chosen answer's negative log-likelihood per token, which is added to the loss; 0: none
    nll_coef: float = at_least(0, 0.2)

    data_formats = ("preference",)
    needs_reference = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise UserError(
                f"stage.loss_type={self.loss_type} has no label smoothing",
                f"stage.label_smoothing={self.label_smoothing}",
                "stage.label_smoothing=0, or stage.loss_type=sigmoid",
            )

    def build_objective(self, model: LanguageModel) -> Objective:
        return Dpo(self.beta, Reference.of(model, self.lora), self.loss_type, self.label_smoothing, self.nll_coef)


@dataclass(eq=False)
class Dpo(Objective):
    """A loss of the margin h, the log-ratio log p_model - log p_reference of the chosen answer minus that of the
    rejected one; summed over pairs.

    sigmoid  -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), s = label_smoothing; s = 0: https://arxiv.org/abs/2305.18290, equation 7;
             else cDPO: https://ericmitchell.ai/cdpo.pdf
    ipo      (h - 1 / (2 beta))^2: https://arxiv.org/abs/2310.12036, equation 17; log-ratios are means over the tokens of an answer, as in TRL

    nll_coef adds that much of the chosen answer's negative log-likelihood per token (https://arxiv.org/abs/2404.19733,
    equation 1): the margin may also grow while both answers lose probability. An answer is what chosen and rejected do
    not share, from the start of the first assistant turn that differs. Shapes: R batch rows, T tokens, B pairs.
    """

    beta: float
    reference: Reference = field()  # required, although Objective has None
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    nll_coef: float = 0.0

    def count(self, batch: Batch) -> int:
        return len(batch.names)

    def loss(self, model: nn.Module, batch: Batch) -> LossSums:
        """Return, summed over pairs: loss; reward_chosen, reward_rejected (beta times the log-ratio, of the kind that
        the loss compares), their reward_margin and reward_accuracy; kl, see `_estimate_kl`; with nll_coef also nll
        (nats per token of the chosen answer).
        """
        import torch

        from data.batching.batch import IGNORE_INDEX
        from models.layers.ops import widest_float

        with torch.no_grad(), self.reference.entered():
            reference_nll = self.reference.model(**batch.inputs).nll
        out = model(**batch.inputs)
        wide = widest_float(out.nll.device)  # fp64 where there is one, because the differences are small
        log_ratios = reference_nll.to(wide) - out.nll.to(wide)  # (R, T), 0 without a label
        # (2, B) tokens; an answer of a dummy batch has none
        lengths = _per_answer(batch, batch.labels != IGNORE_INDEX).clamp(min=1)
        ratios = _per_answer(batch, log_ratios)  # (2, B)
        if self.loss_type == "ipo":
            ratios = ratios / lengths
        chosen, rejected = (self.beta * ratios).float()  # (B,) implicit rewards
        sums = {
            "loss": self._pair_losses(chosen - rejected).sum(),
            "reward_chosen": chosen.detach().sum(),
            "reward_rejected": rejected.detach().sum(),
            "reward_margin": (chosen - rejected).detach().sum(),
            "reward_accuracy": (chosen > rejected).sum().float(),
            "kl": _per_answer(batch, _estimate_kl(log_ratios.detach()))[0].sum().float(),
        }
        if self.nll_coef:
            nll = (_per_answer(batch, out.nll) / lengths)[0].sum()
            sums |= {"loss": sums["loss"] + self.nll_coef * nll, "nll": nll.detach()}
        if out.aux_loss is not None:
            aux = out.aux_loss.sum() / 2  # a pair is one item and has two sequences
            sums |= {"loss": sums["loss"] + aux, "aux_loss": aux}
        return sums

    def _pair_losses(self, margins: Tensor) -> Tensor:
        """margins: (B,) differences of rewards -> (B,)"""
        import torch.nn.functional as F

        if self.loss_type == "ipo":
            return (margins / self.beta - 1 / (2 * self.beta)) ** 2
        losses = -F.logsigmoid(margins)
        if not self.label_smoothing:
            return losses
        return (1 - self.label_smoothing) * losses - self.label_smoothing * F.logsigmoid(-margins)


def _per_answer(batch: Batch, values: Tensor) -> Tensor:
    """Sum the values of the tokens (R, T) -> (2, B), of the chosen and of the rejected answers."""
    from models.layers.ops import widest_float

    return batch.sum_per_document(values.to(widest_float(values.device))).view(2, -1)


def _estimate_kl(log_ratios: Tensor) -> Tensor:
    """Estimate KL(model || reference) at each token from log p_model - log p_reference of the token of the data:
    exp(-x) - 1 + x.

    Never negative; its sum over an answer is an unbiased estimate (nats) where the answer was sampled from the model
    (k3 of http://joschu.net/blog/kl-approx.html). Answers of a data file are not: it says how far the model moved on
    the chosen answers.
    """
    import torch

    return torch.expm1(-log_ratios) + log_ratios
