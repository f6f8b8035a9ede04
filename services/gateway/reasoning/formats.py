"""How models mark their reasoning: each way is a value; a model's chat template says which it uses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Marks around the reasoning at the beginning of an answer, and marks of the answer, which are dropped."""

    models: str
    begins: tuple[str, ...]
    end: str
    signs: tuple[str, ...]  # texts that a template has, all of them
    answer: tuple[str, ...] = ()  # marks around the answer, or headers in front of it

    @property
    def marks(self) -> tuple[str, ...]:
        """All of its marks."""
        return (*self.begins, self.end, *self.answer)


_THINK = ("<think>",)
_HERE = ("Here is my thought process:", "Here's my thought process:")
# In the order in which a template's signs are looked for.
FORMATS = (
    ReasoningFormat(
        "gpt-oss (harmony)",
        ("<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>analysis<|message|>"),
        "<|end|>",
        ("<|channel|>", "analysis"),
        (
            "<|start|>assistant<|channel|>final<|message|>", "<|channel|>final<|message|>",
            "<|start|>assistant<|channel|>commentary<|message|>", "<|channel|>commentary<|message|>",
            "<|start|>assistant<|channel|>analysis<|message|>", "<|channel|>analysis<|message|>",
            "<|return|>", "<|end|>",
        ),
    ),
    ReasoningFormat("Granite 3.3, ERNIE 4.5", _THINK, "</think>", ("<think>", "<response>"),
                    ("<response>", "</response>")),
    ReasoningFormat("Hunyuan A13B", _THINK, "</think>", ("<think>", "<answer>"), ("<answer>", "</answer>")),
    ReasoningFormat("LongCat", ("<longcat_think>",), "</longcat_think>", ("<longcat_think>",)),
    ReasoningFormat("Kimi VL", ("◁think▷",), "◁/think▷", ("◁think▷",)),
    ReasoningFormat(
        "Command A Reasoning", ("<|START_THINKING|>",), "<|END_THINKING|>", ("<|START_THINKING|>",),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ReasoningFormat(
        "DeepSeek R1, V3.1; Qwen 3, QwQ, GLM 4.5, MiniMax M1, M2; Step 3, Olmo 3, Nemotron, Kimi K2 Thinking, MiMo",
        _THINK, "</think>", ("<think>",),
    ),
    ReasoningFormat("Magistral", ("[THINK]",), "[/THINK]", ("[THINK]",)),
    ReasoningFormat("Seed-OSS", ("<seed:think>",), "</seed:think>", ("<seed:think>",)),
    ReasoningFormat("others with these tags", ("<reasoning>",), "</reasoning>", ("<reasoning>",)),
    ReasoningFormat("Granite 3.2", _HERE, "Here is my response:", _HERE[:1], ("Here's my response:",)),
)  # fmt: skip


@lru_cache
def reasoning_of(template: str) -> ReasoningFormat | None:
    """How a model marks its reasoning, by its chat template; None if it has none."""
    return next((form for form in FORMATS if all(sign in template for sign in form.signs)), None)
