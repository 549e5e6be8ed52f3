"""What an eval of a lossy codec has measured, and whether that is good enough.

The model ran twice over the same prompts: its prefix as it is, and coded and decoded. What is compared is what it says
next. All four limits must hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

LEAST_NEEDLES = 5
"""Of those asked for, the model must find so many without the codec, or nothing can be said of retrieval."""


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings eval_min_agreement, eval_max_kl (nats), eval_max_perplexity_ratio and eval_min_retrieval."""

    min_agreement: float
    max_kl: float
    max_perplexity_ratio: float
    min_retrieval: float


class Needles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts at one depth (0 first, 1 last) of a context of `context_tokens`: of `asked`, `raw_found` were recalled with
    the prefix as it is, and `both_found` of these with the coded one as well."""

    context_tokens: int
    depth: float
    asked: int
    raw_found: int
    both_found: int


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`positions` tokens of `prompts` prompts were predicted, each from the true ones before it, with both prefixes:
    the share of them where the likeliest token is the same; Kullback-Leibler divergence of the predictions (nats,
    from the raw to the coded one), on average and at the 99th percentile; perplexity of the true tokens. Then
    `generated` tokens were generated greedily, and `generated_agreement` of them are the same up to the first that
    differs. Nothing is infinite."""

    prompts: int
    positions: int
    agreement: float
    kl: float
    kl_p99: float
    raw_perplexity: float
    coded_perplexity: float
    generated: int
    generated_agreement: float
    needles: tuple[Needles, ...]

    @property
    def perplexity_ratio(self) -> float:
        return self.coded_perplexity / self.raw_perplexity

    @property
    def asked(self) -> int:
        return sum(row.asked for row in self.needles)

    @property
    def raw_found(self) -> int:
        return sum(row.raw_found for row in self.needles)

    @property
    def both_found(self) -> int:
        return sum(row.both_found for row in self.needles)

    @property
    def retrieval(self) -> float:
        """Of what is recalled with the prefix as it is, the share that is with the coded one. 0: nothing is."""
        return self.both_found / self.raw_found if self.raw_found else 0.0


@dataclass(frozen=True, slots=True)
class Check:
    """One limit: the setting that it is, what was measured, and whether it holds. `problem` says why not."""

    setting: str
    measured: float
    limit: float
    problem: str = ""

    @property
    def holds(self) -> bool:
        return not self.problem


def check_all(measured: Measured, limits: Thresholds) -> tuple[Check, ...]:
    """In the order in which people read them. A number that is none holds nowhere."""
    return (
        _at_least("eval_min_agreement", "agreement", measured.agreement, limits.min_agreement),
        _at_most("eval_max_kl", "the KL divergence", measured.kl, limits.max_kl),
        _at_most(
            "eval_max_perplexity_ratio",
            "the ratio of perplexities",
            measured.perplexity_ratio,
            limits.max_perplexity_ratio,
        ),
        _retrieval(measured, limits.min_retrieval),
    )


def why_failed(measured: Measured, limits: Thresholds) -> str:
    """All that is not good enough, in words; empty when all is."""
    return "; ".join(check.problem for check in check_all(measured, limits) if check.problem)


def _at_least(setting: str, name: str, value: float, limit: float) -> Check:
    return Check(setting, value, limit, "" if value >= limit else f"{name} is {value:.4f}, below {setting} {limit:g}")


def _at_most(setting: str, name: str, value: float, limit: float) -> Check:
    return Check(setting, value, limit, "" if value <= limit else f"{name} is {value:.4f}, above {setting} {limit:g}")


def _retrieval(measured: Measured, limit: float) -> Check:
    check = _at_least("eval_min_retrieval", "retrieval", measured.retrieval, limit)
    if limit and measured.raw_found < min(LEAST_NEEDLES, measured.asked or 1):
        found = f"{measured.raw_found} of {measured.asked} facts"
        problem = f"even without the codec the model recalls {found}, which says nothing of retrieval"
        return Check(check.setting, check.measured, limit, f"{problem} (eval_min_retrieval = 0 leaves it out)")
    return check
