"""Which decodings a report compares: the methods that a recipe names under evaluate.methods, as `evaluate.run.Method`s. Decodes nothing."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cdlm import data, trajectories
from cdlm.decode import DecodeConfig, changed
from cdlm.evaluate.assisted import DiffusionGenerateConfig, GenerateConfig
from cdlm.evaluate.run import Method, Row, mean
from cdlm.families.base import DiffusionLM
from cdlm.recipe import OTHER_MODEL
from cdlm.runs import REDECIDING_METHODS, Run, proposals_of
from cdlm.speculate import SpeculateConfig

OF_THE_STUDENT = ("student_sequential", "student", "student_uncached")


class Methods:
    """The methods of one evaluation.

    naive, own: how the teacher and the student decode. threshold: the parameter under which the report's summary looks for the student.
    cut_steps: to how few steps the teacher is cut; what `cut_to` found among them.
    """

    def __init__(self, run: Run, teacher: DiffusionLM, student: DiffusionLM, peft_model: Any):
        r, e = run.recipe, run.recipe.evaluate
        self.run, self.teacher, self.student, self.peft_model = run, teacher, student, peft_model
        self.other = run.load_other()
        self.cut_steps: set[float] = set(e.truncated_steps)
        if teacher.redecides:
            self.naive, self.own = run.sampler("teacher"), run.sampler("student")
            assert self.own.entropy_bound is not None
            self.threshold, swept = self.own.entropy_bound, e.entropy_bounds
        else:
            self.naive = trajectories.teacher_decoding(
                teacher.facts, r.decode.max_new_tokens, r.decode.block_length, stop_at_eos=e.teacher_stops_at_eos
            )
            self.own, self.threshold, swept = run.decode_config(), r.decode.confidence_threshold, e.thresholds
        self.thresholds = sorted({*swept, self.threshold})
        self.drafting = self._drafting() if r.train.objective == "tidar" else {}

    @contextlib.contextmanager
    def teacher_weights(self) -> Iterator[None]:
        """Inside, the model that both may share has the teacher's weights."""
        with self.peft_model.disable_adapter() if self.peft_model is not None else contextlib.nullcontext():
            yield

    def named(self, name: str) -> list[Method]:
        """A method of the recipe, at each of its values."""
        if self.teacher.redecides and name in REDECIDING_METHODS:
            return self._redeciding(name)
        if name == OTHER_MODEL:
            assert self.other is not None
            return [Method(name, None, GenerateConfig(self.run.recipe.decode.max_new_tokens), self.other, contextlib.nullcontext)]
        if name in self.drafting:
            return self.drafting[name]
        who = (self.student, contextlib.nullcontext) if name in OF_THE_STUDENT else (self.teacher, self.teacher_weights)
        return [Method(name, parameter, config, *who) for parameter, config in self._decodings(name)]

    def _decodings(self, name: str) -> list[tuple[float | None, DecodeConfig]]:
        """How a method decodes: its values, each with its decoding."""
        e, naive, own = self.run.recipe.evaluate, self.naive, self.own
        if name == "teacher":
            return [(None, naive)]
        if name in ("teacher_threshold", "teacher_threshold_stop"):
            stop = e.teacher_stops_at_eos or name == "teacher_threshold_stop"
            return [(t, changed(naive, confidence_threshold=t, stop_at_eos=stop)) for t in self.thresholds]
        if name == "teacher_fixed":
            return [(k, changed(naive, tokens_per_step=int(k))) for k in sorted(set(e.fixed))]
        if name == "teacher_factor":
            return [(f, changed(naive, factor=f)) for f in sorted(set(e.factors))]
        if name == "teacher_entropy_bound":
            return [(b, changed(naive, entropy_bound=b, order="entropy")) for b in sorted(set(e.entropy_bounds))]
        if name in ("teacher_prefix_cache", "teacher_dual_cache"):
            kind = name.removeprefix("teacher_").removesuffix("_cache")
            return [(t, changed(naive, confidence_threshold=t, approximate_cache=kind)) for t in self.thresholds]
        if name == "teacher_interval_cache":
            every = {"prompt_refresh": e.prompt_refresh, "response_refresh": e.response_refresh}
            return [(None, changed(naive, approximate_cache="interval", **every))]
        if name == "autoregressive":
            return [(None, DecodeConfig(self.run.recipe.decode.max_new_tokens, 1, tokens_per_step=1))]
        if name in ("teacher_block_causal", "student_sequential"):
            return [(None, changed(own, tokens_per_step=1))]
        if name == "student":
            return [(t, changed(own, confidence_threshold=t)) for t in self.thresholds]
        if name == "student_uncached":
            return [(self.threshold, changed(own, use_cache=False))]
        assert name == "teacher_truncated", name
        return [(s, changed(naive, steps=int(s))) for s in sorted(self.cut_steps)]

    def _redeciding(self, name: str) -> list[Method]:
        """Methods of a model that decides every slot at every step; see evaluate/run.py."""
        naive, own, teacher = self.naive, self.own, (self.teacher, self.teacher_weights)
        if name == "teacher":
            return [Method(name, None, naive, *teacher, title="teacher, its own sampler")]
        if name == "teacher_truncated":
            cut = "teacher, its own sampler cut to few steps a block"
            return [Method(name, s, replace(naive, max_denoising_steps=int(s)), *teacher, title=cut) for s in sorted(self.cut_steps)]
        if name == "teacher_entropy_bound":
            title = "teacher, the student's sampler"
            return [Method(name, b, replace(own, entropy_bound=b), *teacher, title=title) for b in self.thresholds]
        if name == "transformers_generate":
            return [Method(name, None, DiffusionGenerateConfig(naive), *teacher)]
        title = "student, its own sampler"
        return [
            Method(name, b, replace(own, entropy_bound=b), self.student, contextlib.nullcontext, title) for b in self.thresholds
        ]

    def cut_to(self, rows: list[Row]) -> float:
        """To how many steps the teacher is cut beside what the recipe asks: as many as these rows of the student took, at least one a
        block; where every step decides every slot, steps of a block, of which an answer has as many as it has commits."""
        if self.teacher.redecides:
            cut = max(1, round(sum(row.steps for row in rows) / sum(row.commit_forwards for row in rows)))
        else:
            cut = max(self.naive.blocks + (self.teacher.facts.block_origin == "zero"), round(mean(row.steps for row in rows)))
        self.cut_steps |= {cut}
        return cut

    def _drafting(self) -> dict[str, list[Method]]:
        """What can be measured after objective tidar, by its name in the recipe."""
        r, e = self.run.recipe, self.run.recipe.evaluate
        budget, length, own = r.decode.max_new_tokens, r.decode.block_length, proposals_of(r, self.teacher.hf.config)

        def of_base(name: str, config: Any) -> Method:
            return Method(name, None, config, self.teacher, self.teacher_weights)

        def of_student(name: str, parameter: float | None, **values: Any) -> Method:
            config = SpeculateConfig(budget, **{"draft_length": length, **values})
            return Method(name, parameter, config, self.student, contextlib.nullcontext)

        assistant = None
        if e.draft_model is not None and "assisted" in (e.methods or ()):
            assistant = self.run.load_draft_model().hf
        return {
            "autoregressive": [of_base("autoregressive", SpeculateConfig(budget, 1))],
            "student_autoregressive": [of_student("student_autoregressive", None, draft_length=1)],
            "tidar": [of_student("tidar", count, proposals=count) for count in sorted({*e.proposals, own}, reverse=True)],
            "tidar_linear": [of_student("tidar_linear", None, layout="linear")],
            "tidar_mix": [of_student("tidar_mix", beta, proposals=own, rule="mix", beta=beta) for beta in sorted(set(e.betas))],
            "transformers_greedy": [of_base("transformers_greedy", GenerateConfig(budget))],
            "prompt_lookup": [of_base("prompt_lookup", GenerateConfig(budget, prompt_lookup=length))],
            "assisted": [of_base("assisted", GenerateConfig(budget, assistant=assistant))],
        }


def spread(examples: list[data.Example], count: int) -> list[data.Example]:
    """`count` examples, taken from the groups in turn so that each has its share."""
    groups: dict[str, list[data.Example]] = {}
    for example in examples:
        groups.setdefault(example.group, []).append(example)
    out: list[data.Example] = []
    place = 0
    while len(out) < min(count, len(examples)):
        out += [rows[place] for rows in groups.values() if place < len(rows)]
        place += 1
    return out[:count]
