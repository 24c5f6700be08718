"""Chat templates and answers in the style of public reasoning models, written for these tests."""

import json
from typing import Any, NamedTuple

__all__ = ["FAMILIES", "Transcript", "with_think_tokens"]

ROLES = "{% for m in messages %}<|{{ m.role }}|>{{ m.reasoning_content or '' }}{{ m.content }}\n{% endfor %}"
TOOLS = "{% if tools %}{{ tools | tojson }} in <tool_call></tool_call>{% endif %}"
MISTRAL_TOOLS = "{% if tools %}{{ tools | tojson }} behind [TOOL_CALLS]{% endif %}"


def with_think_tokens(tokenizer: str) -> str:
    """Return the embedded model's tokenizer as JSON, with <think> and </think> as its last tokens; not special."""
    data = json.loads(tokenizer)
    model, first = data["model"], len(data["model"]["vocab"]) - 2
    model["merges"] = model["merges"][:-2]
    model["vocab"] = {token: place for token, place in model["vocab"].items() if place < first}
    for place, mark in enumerate(("<think>", "</think>"), first):
        model["vocab"][mark] = place
        data["added_tokens"].append(dict(data["added_tokens"][0], id=place, content=mark, special=False))
    return json.dumps(data)


class Transcript(NamedTuple):
    """A family.

    Attributes:
        parser: vLLM's name of the parser.
        template: the chat template.
        text: an answer as the model writes it.
        call: the same answer with a call of ``add`` instead of the content; None for a family without calls.
        off: chat_template_kwargs that switch thinking off, if the template can.
        markers: texts that are special tokens of the family's tokenizer.
        added: texts that are added tokens of the tokenizer without being special.
    """

    parser: str
    template: str
    text: str
    call: str | None
    off: dict[str, Any] | None = None
    markers: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


REASONING, CONTENT = "One and one, <b>.\nThat is 2", "It is 2."
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THINK = ("<think>", "</think>")
HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
FAMILIES = {
    "qwen3": Transcript(  # the model opens its thinking; switched off, the prompt has an empty one
        "qwen3",
        TOOLS + ROLES + "<|assistant|>{% if enable_thinking is defined and enable_thinking is false %}"
        "<think>\n\n</think>\n\n{% endif %}",
        f"<think>{REASONING}</think>{CONTENT}",
        f"<think>{REASONING}</think>{CALL}",
        {"enable_thinking": False},
        added=(*THINK, "<tool_call>", "</tool_call>"),
    ),
    "qwen3 thinking": Transcript(  # the prompt opens the thinking
        "qwen3",
        TOOLS + ROLES + "<|assistant|><think>\n",
        f"{REASONING}</think>{CONTENT}",
        f"{REASONING}</think>{CALL}",
        added=(*THINK, "<tool_call>", "</tool_call>"),
    ),
    "deepseek r1": Transcript(
        "deepseek_r1",
        "{% for m in messages %}{% set text = m.content.split('</think>')[-1] %}<|{{ m.role }}|>{{ text }}"
        "{% endfor %}<|Assistant|><think>\n",
        f"{REASONING}</think>{CONTENT}",
        None,
        added=THINK,
    ),
    "deepseek v3.1": Transcript(
        "deepseek_v3",
        ROLES + "<|Assistant|>{% if thinking %}<think>{% else %}</think>{% endif %}",
        f"{REASONING}</think>{CONTENT}",
        None,
        {"thinking": False},
        added=THINK,
    ),
    "glm 4.5": Transcript(
        "glm45",
        TOOLS + ROLES + "<|assistant|>{% if enable_thinking is defined and not enable_thinking %}\n<think></think>"
        "{% endif %}",
        f"\n<think>{REASONING}</think>{CONTENT}",
        f"\n<think>{REASONING}</think>{CALL}",
        {"enable_thinking": False},
        added=(*THINK, "<tool_call>", "</tool_call>"),
    ),
    "magistral": Transcript(
        "mistral",
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
        "[THINK]{{ m.reasoning_content or '' }}[/THINK]{{ m.content }}{% endif %}{% endfor %}" + MISTRAL_TOOLS,
        f"[THINK]{REASONING}[/THINK]{CONTENT}",
        f'[THINK]{REASONING}[/THINK][TOOL_CALLS][{{"name": "add", "arguments": {{"a": 1}}}}]',
        None,
        ("[THINK]", "[/THINK]", "[TOOL_CALLS]"),
    ),
    "seed-oss": Transcript(  # the budget of the template is a hint; thinking_token_budget is a limit
        "seed_oss",
        TOOLS + ROLES + "{% if thinking_budget == 0 %}<seed:think></seed:think>{% endif %}",
        f"<seed:think>{REASONING}</seed:think>{CONTENT}",
        f"<seed:think>{REASONING}</seed:think>{CALL}",
        {"thinking_budget": 0},
        ("<seed:think>", "</seed:think>"),
    ),
    "olmo 3": Transcript(  # its markers are text
        "olmo3", ROLES + "<|assistant|><think>", f"{REASONING}</think>{CONTENT}", None
    ),
    "gpt-oss": Transcript(
        "openai_gptoss",
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}"
        "<|end|>{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
        "Reasoning: {{ reasoning_effort or 'medium' }}<|start|>assistant",
        f"<|channel|>analysis<|message|>{REASONING}<|end|><|start|>assistant<|channel|>final<|message|>{CONTENT}",
        f"<|channel|>analysis<|message|>{REASONING}<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1}',
        None,
        HARMONY,
    ),
}
