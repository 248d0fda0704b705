"""Shows blocks filling up in the terminal: one line a step, the slots revealed by that step in colour."""

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.text import Text

from cdlm import terminal
from cdlm.decode import DecodeConfig, Step


class Trace:
    """A decoding callback for one row. Each line: step, block, and the whole budget so far; open slots are dots, end tokens ∎, and control
    characters of the model's text are written out."""

    def __init__(
        self, tokenizer: Any, config: DecodeConfig, mask_token_id: int, console: Console | None = None, eos_token_ids: tuple[int, ...] = ()
    ):
        self.eos = eos_token_ids
        self.tokenizer, self.config, self.mask = tokenizer, config, mask_token_id
        self.console = console or Console(stderr=True, highlight=False)
        self.slots: list[int] = [mask_token_id] * config.max_new_tokens
        self.count = 0

    def __enter__(self) -> "Trace":
        self.console.print(Text("step block  answer (revealed in this step: green; open: ·)", style="dim"))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def __call__(self, step: Step) -> None:
        self.count += 1
        ids, revealed = step.ids_AS[0].tolist(), step.reveal_AS[0].tolist()
        first = int(step.first_slot_A[0])
        if first < 0:  # the tail of the prompt shares the block
            ids, revealed, first = ids[-first:], revealed[-first:], 0
        end = first + len(ids)
        self.slots[first:end] = ids
        line = Text(f"{self.count:4d} {step.block:5d}  ")
        for slot, token in enumerate(self.slots[:end]):
            fresh = slot >= first and revealed[slot - first]
            shown = "·" if token == self.mask else "∎" if token in self.eos else terminal.visible(self.tokenizer.decode([token]), keep="")
            line.append(shown, style="bold black on green" if fresh else "")
        self.console.print(line)
