"""What a person watching the run sees: log lines, and on a terminal a progress bar under them."""

import sys
import time
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

Part = tuple[str, str]  # text, rich style


class Console:
    """Log lines on standard output; a terminal also gets colours and a bar with the time left.

    Args:
        total_steps: length of the run in steps.
        start_step: steps already done.
        color: allow colours on a terminal.
        file: where to write; standard output by default.
    """

    def __init__(self, total_steps: int, start_step: int = 0, *, color: bool = True, file: TextIO | None = None):
        self.rich = RichConsole(file=file or sys.stdout, no_color=not color, highlight=False, soft_wrap=True)
        self.progress: Progress | None = None
        if self.rich.is_terminal:
            # No refresh thread: loader workers are forked, and must not inherit a lock that it holds.
            self.progress = Progress(
                TextColumn("training"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("elapsed"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.rich,
                auto_refresh=False,
                transient=True,
                expand=True,
            )
            self.task = self.progress.add_task("training", total=total_steps, completed=start_step)
            self.refreshed = 0.0

    def line(self, *parts: Part) -> None:
        """Print one line made of styled parts, after the time."""
        text = Text(time.strftime("[titan] %Y-%m-%d %H:%M:%S INFO - "), style="dim")
        # The base style would dim every part, so the parts are joined as their own text.
        self.rich.print(Text.assemble(text, *parts), soft_wrap=True)

    def message(self, text: str) -> None:
        """Print plain text, after the time."""
        self.line((text, ""))

    def advance(self, step: int) -> None:
        """Move the bar to ``step``; draws at most ten times a second."""
        if self.progress is None:
            return
        if not self.progress.live.is_started:
            self.progress.start()
        self.progress.update(self.task, completed=step)
        if (now := time.monotonic()) - self.refreshed > 0.1:
            self.progress.refresh()
            self.refreshed = now

    def close(self) -> None:
        """Remove the bar."""
        if self.progress is not None:
            self.progress.stop()


def step_parts(step: int, record: dict, peak_memory_share: float) -> list[Part]:
    """The line of a training step, in torchtitan's order.

    Args:
        step: the step.
        record: the step's ``metrics.jsonl`` object, throughput averaged since the last line.
        peak_memory_share: peak memory as a share of what the device has.
    """

    def number(key: str, form: str) -> str:
        value = record.get(key)
        return "n/a" if value is None else format(value, form)

    mfu = number("mfu", ".2f")
    parts = [
        (f"step: {step:2}  ", "red"),
        (f"loss: {number('loss', '7.4f')}  ", "green"),
        (f"grad_norm: {number('grad_norm', '7.4f')}  ", "yellow"),
        (f"memory: {number('memory_gib', '5.2f')}GiB({peak_memory_share:.2%})  ", "bright_cyan"),
        (f"tps: {number('tps', ',.0f')}  ", "blue"),
        (f"tflops: {number('tflops', ',.2f')}  ", "cyan"),
        (f"mfu: {mfu}" + ("" if mfu == "n/a" else "%"), "magenta"),
    ]
    if record.get("skipped"):
        parts.append((f"  skipped: {record['skipped']}", "bold red"))
    return parts
