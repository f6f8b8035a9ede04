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
    ends: tuple[str, ...] = ()  # marks that may be in the place of `end`

    @property
    def marks(self) -> tuple[str, ...]:
        """All of its marks."""
        return (*self.begins, self.end, *self.ends, *self.answer)


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
    ReasoningFormat("Gemma 4", ("<|channel>thought",), "<channel|>", ("<|channel>",)),
    ReasoningFormat(
        "Kimi K3", ("<|open|>think<|sep|>",), "<|close|>think<|sep|>", ("<|open|>",),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
    ),
    ReasoningFormat(
        "Muse Glimmer", ("to=self<|message|>", "<|start|>assistant to=self<|message|>"), "<|eom|>",
        ("<atem:function_calls>",),
        (
            "<|start|>assistant to=user<|message|>", "to=user<|message|>", "<|start|>assistant<|message|>", "<|eom|>",
            "<|eot|>",
        ),
    ),
    ReasoningFormat(
        "Inkling", ("<|content_thinking|>", "<|message_model|><|content_thinking|>"), "<|end_message|>",
        ("<|content_thinking|>",),
        (
            "<|message_model|><|content_text|>", "<|content_text|>", "<|end_message|>",
            "<|content_model_end_sampling|>",
        ),
    ),
    ReasoningFormat(
        "K2 Horizon", ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"), "</ifm|think>", ("<ifm|think>",),
        ends=("</ifm|think_fast>", "</ifm|think_faster>"),
    ),
    ReasoningFormat("Solar Open 2", ("<|think:start|>",), "<|think:end|>", ("<|think:start|>",)),
    ReasoningFormat("Apertus", ("<|inner_prefix|>",), "<|inner_suffix|>", ("<|inner_prefix|>",), ("<|inner_suffix|>",)),
    ReasoningFormat("MiniMax M3", ("<mm:think>",), "</mm:think>", ("<mm:think>",), ("</mm:think>",)),
    ReasoningFormat("Hunyuan 3, 4", ("<think:opensource>",), "</think:opensource>", (":opensource",)),
    ReasoningFormat("Granite 3.3, ERNIE 4.5", _THINK, "</think>", ("<think>", "<response>"),
                    ("<response>", "</response>", "\n</response>")),
    ReasoningFormat("Hunyuan A13B", _THINK, "</think>", ("<think>", "<answer>"),
                    ("<answer>", "</answer>", "\n</answer>")),
    ReasoningFormat("LongCat", ("<longcat_think>",), "</longcat_think>", ("<longcat_think>",)),
    ReasoningFormat("Kimi VL", ("◁think▷",), "◁/think▷", ("◁think▷",)),
    ReasoningFormat(
        "Command A Reasoning, Command A Plus", ("<|START_THINKING|>",), "<|END_THINKING|>", ("<|START_THINKING|>",),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ReasoningFormat(
        "DeepSeek R1, V3.1, V4; Qwen 3, QwQ, GLM 4.5, MiniMax M1, M2; Step 3, Olmo 3, Nemotron, Kimi K2 Thinking, "
        "MiMo, Ling 3, Laguna, Holo 2, MiniCPM 5",
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
