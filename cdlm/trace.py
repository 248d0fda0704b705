"""Shows blocks filling up in the terminal: one line a step, the slots revealed by that step in colour.

Where every step decides every slot, it shows that: what a step accepts anew, what it decides otherwise, and what it takes back.
"""

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.text import Text

from cdlm.decode import DecodeConfig, Step

FRESH, OTHER, TAKEN_BACK = "bold black on green", "bold black on yellow", "bold white on red"


class Trace:
    """A decoding callback for one row. Each line: step, block, and the answer so far; open slots are dots, end tokens ∎.

    Blocks before the active one are shown as they became at their end.
    """

    def __init__(self, tokenizer: Any, config: DecodeConfig, console: Console | None = None, eos_token_ids: tuple[int, ...] = ()):
        self.eos = eos_token_ids
        self.tokenizer, self.config = tokenizer, config
        self.console = console or Console(stderr=True, highlight=False)
        self.done: list[int] = []  # the answer before the active block
        self.block = -1
        self.held: list[int | None] = []  # token of each slot of the active block; None: open
        self.output: list[int] = []
        self.count = 0

    def __enter__(self) -> "Trace":
        legend = "revealed in this step: green; open: ·"
        if self.config.redecides:
            legend = "accepted by this step: green, with another token: yellow; taken back: red; noise: ·"
        self.console.print(Text(f"step block  answer ({legend})", style="dim"))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def __call__(self, step: Step) -> None:
        self.count += 1
        tail = max(0, -int(step.first_slot_A[0]))  # tokens of the prompt that share the block
        ids, revealed = step.ids_AS[0, tail:].tolist(), step.reveal_AS[0, tail:].tolist()
        if step.block != self.block:
            self.done += self.output
            self.block, self.held = step.block, [None] * len(ids)
        self.output = step.output_AS[0, tail:].tolist()
        line = Text(f"{self.count:4d} {step.block:5d}  ")
        for token in self.done:
            line.append(self._shown(token))
        for slot, (token, now) in enumerate(zip(ids, revealed, strict=True)):
            before = self.held[slot]
            kept = token if now else None if self.config.redecides else before
            style = "" if kept == before else FRESH if before is None else OTHER if kept is not None else TAKEN_BACK
            line.append("·" if kept is None else self._shown(kept), style=style)
            self.held[slot] = kept
        self.console.print(line)

    def _shown(self, token: int) -> str:
        return "∎" if token in self.eos else self.tokenizer.decode([token])
