"""Chat templates in the style of public families, written for these tests; each uses another feature of a renderer."""

__all__ = ["TEMPLATES"]

CALLS = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "chatml with a default system": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
        "{% for m in messages -%}\n<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{%- endfor %}"
    ),
    "hermes": (
        "{%- if tools %}\n{{- '<tools>\n' }}\n    {%- for tool in tools %}\n{{- tool | tojson }}\n{% endfor %}"
        "</tools>\n"
        "{%- endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}" + CALLS + "{% endfor %}"
    ),
    "qwen 2": (
        "{%- if tools is not none %}{%- for t in tools %}{{ t | tojson(indent=4) }}{%- endfor %}{%- else %}"
        "none{%- endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    ),
    "qwen 3": (
        "{%- set ns = namespace(last=messages|length - 1, found=true) %}{%- for m in messages[::-1] %}"
        "{%- set index = (messages|length - 1) - loop.index0 %}"
        "{%- if ns.found and m.role == 'user' and m.content is string"
        " and not (m.content.startswith('<r>') and m.content.endswith('</r>')) %}{%- set ns.found = false %}"
        "{%- set ns.last = index %}{%- endif %}{%- endfor %}{% for m in messages %}{{ loop.index0 > ns.last }}"
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endfor %}"
        "{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{%- endif %}"
    ),
    "qwen coder": (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
        "{% for name, value in c.function.arguments|items %}<parameter={{ name }}>"
        "{{ value | tojson | safe if value is mapping or (value is sequence and value is not string) else value"
        " | string }}"
        "{% endfor %}{% endfor %}{{ m.content }}{% endfor %}"
    ),
    "llama 2": (
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
        "{% set system = messages[0]['content'] %}"
        "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for m in rest %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}"
        "{% endif %}"
        "{% if loop.index0 == 0 and system != false %}"
        "{% set text = '<<SYS>>\n' + system + '\n<</SYS>>\n' + m['content'] %}"
        "{% else %}{% set text = m['content'] %}{% endif %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + text | trim + ' [/INST]' }}{% else %}"
        "{{ ' ' + text | trim + ' ' + eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    "llama 3": (
        "{% set loop_messages = messages %}{% for m in loop_messages %}"
        "{% set text = '<|start|>' + m['role'] + '<|end|>\n\n'"
        " + m['content'] | trim + '<|eot|>' %}{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}"
        "{{ text }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
    ),
    "llama 3.1": (
        "{{- bos_token }}{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}"
        "{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
        "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{- 'Today: ' + date_string }}"
        "{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}"
        "{%- endif %}"
        "{% for m in messages %}{%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}"
        "{{- m.role + m.content | trim }}{%- elif 'tool_calls' in m %}{%- if not m.tool_calls|length == 1 %}"
        "{{- raise_exception('one call only') }}{%- endif %}{%- set c = m.tool_calls[0].function %}"
        "{{- '{\"name\": \"' + c.name + '\", ' }}{{- '\"parameters\": ' }}{{- c.arguments | tojson }}{{- '}' }}"
        "{%- elif m.role == 'tool' %}{%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}"
        "{%- else %}{{- m.content }}{%- endif %}{%- endif %}{% endfor %}"
    ),
    "llama with a date": "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
    "mistral with tools": (
        "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
        "{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
        "{%- if m.role == 'user' and tools is not none and m == users[-1] %}"
        "[AVAILABLE_TOOLS] [{% for tool in tools %}"
        '{%- set tool = tool.function %}{{- \'{"type": "function", "function": {\' }}'
        "{%- for key, value in tool.items() if key != 'return' %}{%- if value is string %}"
        "{{- '\"' + key + '\": \"' + value + '\"' }}{%- else %}{{- '\"' + key + '\": ' + value | tojson }}"
        "{%- endif %}"
        "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- '}}' }}{% endfor %}"
        "][/AVAILABLE_TOOLS]{%- endif %}"
        "{{- m.content }}{% for c in m.tool_calls or [] %}{%- set out = c.function | tojson %}{{- out[:-1] }}"
        "{%- if c.id is not defined %}{{- raise_exception('an id is needed') }}{%- endif %}"
        "{{- ', \"id\": \"' + c.id + '\"}' }}{% endfor %}{% endfor %}"
    ),
    "mixtral": (
        "{%- for m in messages %}{%- if m['role'] == 'system' -%}{{- m['content'] -}}{%- else -%}"
        "{%- if m['role'] == 'user'"
        " -%}{{-' [INST] ' + m['content'].rstrip() + ' [/INST]'-}}{%- else -%}{{-'' + m['content'] + '</s>' -}}"
        "{%- endif -%}"
        "{%- endif -%}{%- endfor -%}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% set role = 'model' %}{% else %}"
        "{% set role = m['role'] %}"
        "{% endif %}{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
    ),
    "gemma 3": (
        "{%- if messages[0]['role'] == 'system' -%}{%- if messages[0]['content'] is string -%}"
        "{%- set first = messages[0]['content'] + '\n\n' -%}{%- else -%}"
        "{%- set first = messages[0]['content'][0]['text'] -%}"
        "{%- endif -%}{%- set rest = messages[1:] -%}{%- else -%}{%- set first = '' -%}"
        "{%- set rest = messages -%}{%- endif -%}"
        "{%- for m in rest -%}{{ (first if loop.first else '') }}{%- if m['content'] is string -%}"
        "{{ m['content'] | trim }}"
        "{%- elif m['content'] is iterable -%}{%- for item in m['content'] -%}{{ item['text'] | trim }}{%- endfor -%}"
        "{%- endif -%}{%- endfor -%}"
    ),
    "phi 2": (
        "{% for m in messages %}{{ {'user': 'Instruct: ', 'assistant': 'Output: '}.get(m.role, '') }}"
        "{{ m.content }}\n{% endfor %}"
    ),
    "phi 3": (
        "{% for m in messages %}{% if m['role'] == 'system' and m['content'] %}"
        "{{'<|system|>\n' + m['content'] + '<|end|>\n'}}"
        "{% elif m['role'] == 'user' %}{{'<|user|>\n' + m['content'] + '<|end|>\n'}}"
        "{% elif m['role'] == 'assistant' %}"
        "{{'<|assistant|>\n' + m['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "phi 4": (
        "{% for m in messages %}{% if (m['role'] == 'system') %}{{'<|sys|>' + m['content'] + '<|e|>'}}"
        "{% if 'tools' in m and m['tools'] is not none %}{{ '<|tool|>' + m['tools'] }}{% endif %}"
        "{% else %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endif %}{% endfor %}"
    ),
    "zephyr": (
        "{% for message in messages %}\n{% if message['role'] == 'user' %}"
        "\n{{ '<|user|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}"
        "\n{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
    ),
    "command r": (
        "{% if documents %}{% for d in documents %}{{ d.title }}{% endfor %}{% elif documents is none %}"
        "no documents{% endif %}"
        "{%- set ns = namespace(text='') -%}{% for m in messages %}"
        "{% set ns.text = ns.text + m.role | upper + ':' + m.content %}"
        "{% endfor %}{{ ns.text }}"
    ),
    "command r with tools": (
        "{% macro kind(of) %}{% if of == 'integer' %}int{% elif of == 'string' %}str{% else %}{{ of | title }}"
        "{% endif %}"
        "{% endmacro %}{% for t in tools or [] %}def {{ t.function.name }}({% for name, own in"
        " t.function.parameters.properties.items() %}{{ name }}: {{ kind(own.type) }}{% if not loop.last %}"
        ", {% endif %}"
        "{% endfor %}){% endfor %}{% for m in messages %}{{ m.content }}{% if m.tool_calls %}"
        "{{ m.tool_calls | map(attribute='function') | map(attribute='name') | join('; ') }}{% endif %}{% endfor %}"
    ),
    "deepseek": (
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
        "{{ bos_token }}"
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\n\n' }}"
        "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}"
        "{% elif m['role'] == 'system' %}{{ m['content'] + '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
    "deepseek 3": (
        "{% set ns = namespace(is_first=false, is_tool=false, system='') %}{%- for m in messages %}"
        "{%- if m.role == 'system' %}"
        "{% set ns.system = m.content %}{%- endif %}{%- endfor %}{{ ns.system }}{%- for m in messages %}"
        "{%- if m.role == 'assistant' and m.tool_calls is defined %}{%- for c in m.tool_calls %}"
        "{%- if not ns.is_first %}"
        "{{ 'first:' + c.function.name + '\n```json\n' + c.function.arguments | tojson + '\n```' }}"
        "{%- set ns.is_first = true %}"
        "{%- else %}{{ '\n' + c.function.name }}{%- endif %}{%- endfor %}{%- elif m.role == 'tool' %}"
        "{%- set ns.is_tool = true -%}"
        "{{ '<out>' + m.content }}{%- endif %}{%- endfor -%}{% if ns.is_tool %}{{ '<outs_end>' }}{% endif %}"
    ),
    "glm": (
        "[gMASK]<sop>{%- if tools -%}<|system|>{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}"
        "{% endfor %}"
        "{%- endif -%}{%- macro visible(content) -%}{%- if content is string -%}{{- content }}"
        "{%- elif content is iterable and"
        " content is not mapping -%}{%- for i in content -%}{{- i.text }}{%- endfor -%}{%- else -%}{{- content }}"
        "{%- endif -%}"
        "{%- endmacro -%}{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}"
        "|>{{ visible(m.content) }}"
        "{% for c in m.tool_calls or [] %}{% set args = c.function.arguments %}{% for k, v in args.items() %}"
        "<k>{{ k }}</k>"
        "<v>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</v>{% endfor %}{% endfor %}{% endfor %}"
    ),
    "glm 3": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.metadata or '' }}\n {{ m.content }}{% endfor %}<|assistant|>"
    ),
    "granite": (
        "{%- set tools = tools | default([], true) %}{%- if tools %}{{- tools | map('tojson') | join('\n') }}"
        "{%- endif %}"
        "{%- for m in messages %}{{- '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] }}"
        "{%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant' }}{%- if controls %}"
        "{{- ' ' + controls | tojson() }}{%- endif %}{{- '<|end_of_role|>' }}{%- endif %}{%- endfor %}"
    ),
    "granite, ascii": (
        "{% for t in tools or [] %}{{ t | tojson(true) }}{{ t | tojson(ensure_ascii=true, indent=2) }}{% endfor %}"
    ),
    "olmo": (
        "{{ eos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
        "{% if not loop.last %}{{ eos_token }}{% endif %}{% endgeneration %}{% else %}<|{{ m['role'] }}"
        "|>{{ m['content'] }}"
        "{% endif %}{% endfor %}"
    ),
    "smollm": (
        "{% set text = 'outer' %}{% for m in messages %}{% generation %}{% set text = m.content %}{{ text }}"
        "{% endgeneration %}{{ text }}{% endfor %}"
    ),
    "falcon": (
        "{% for m in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}{{ m['role'] | capitalize }}: "
        "{{ m['content'] | replace('\r\n', '\n') | replace('\n\n', '\n') }}{% endfor %}\nFalcon:"
    ),
    "vicuna": (
        "{% for m in messages %}{% if loop.index0 == 0 and m.role == 'system' %}{{ m.content }} {% continue %}"
        "{% endif %}"
        "{{ m.role | upper }}: {{ m.content }}{{ eos_token if m.role == 'assistant' else ' ' }}"
        "{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}ASSISTANT:"
    ),
    "alpaca": (
        "{% for m in messages %}{% if m.role == 'user' %}### Instruction:\n{{ m.content.strip() }}\n\n"
        "{% elif m.role == 'assistant' %}### Response:\n{{ m.content.strip() }}\n\n{% endif %}{% endfor %}"
        "### Response:\n"
    ),
    "yi": (
        "{% if not system_message is defined %}"
        "{% set system_message = messages | rejectattr('role', 'ne', 'system') | list %}{% endif %}"
        "{{ system_message | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    ),
    "internlm": (
        "{{ bos_token }}{%- for m in messages -%}"
        "\n    {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>' ~ '\n' -}}\n"
        "{%- endfor %}\n{%- if add_generation_prompt -%}\n    {{- '<|im_start|>assistant\n' -}}\n{%- endif %}\n"
    ),
    "jamba": (
        "{%- for m in messages -%}{%- set content = m['content'] -%}{%- if not loop.first %} {% endif -%}"
        "{{ '%s: %s' % (m.role, content) }}{{ '{:>9}'.format(m.role) }}{%- endfor -%}"
        "{{ pad_token | default('none') }}"
    ),
    "nemotron": (
        "{%- for t in tools or [] %}{{ '<tool> ' }}{{ t.function | tojson(separators=(',', ':'), sort_keys=true) }}"
        "{{ ' </tool>' }}{% endfor %}{% for m in messages %}<extra_id_1>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
    ),
    "minimax": (
        "{%- set last = messages[-1] %}{{- last.role }}{%- for m in messages | reverse %}{{- m.content | length }}"
        "{%- endfor %}{% for c in messages | map(attribute='tool_calls', default=[]) | sum(start=[]) %}"
        "{{ c.function.arguments | dictsort }}{{ c.function.arguments.keys() | list }}{% endfor %}"
    ),
    "kimi": (
        "{%- if tools -%}<|im_system|>{{ tools | tojson(separators=(',', ':')) }}{%- endif -%}"
        "{%- for m in messages -%}"
        "{%- set name = m.get('name') or m['role'] -%}<|im_{{ name }}|>{{ m['content'] }}"
        "{{ m.get('tool_call_id', '') }}"
        "{%- endfor -%}"
    ),
    "gpt oss": (
        "{%- macro of(spec) -%}{%- if spec.type == 'object' -%}{ {%- for k, v in spec.properties.items() -%}{{ k }}: "
        "{{ of(v) }}{%- if k not in (spec.required or []) -%}?{%- endif -%}, {%- endfor -%} }{%- elif spec.enum -%}"
        "{{ spec.enum | join(' | ') }}{%- else -%}{{ spec.type }}{%- endif -%}{%- endmacro -%}{%- if tools -%}"
        "{%- for t in tools -%}{{ t.function.name }}: {{ of(t.function.parameters) }}{%- endfor -%}{%- endif -%}"
        "{%- for m in messages -%}<|start|>{{ 'developer' if m.role == 'system' else m.role }}"
        "<|message|>{{ m.content }}<|end|>"
        "{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
    ),
    "starcoder": (
        "{%- for m in messages %}{%- if m.content is not none and m.content != '' %}{{ loop.cycle('a', 'b') }}"
        "{{ m.content.splitlines() | first }}{{ m.content[:5] }}{{ m.content | truncate(7, true, '…') }}"
        "{%- else %}{{ raise_exception('a message is empty') }}{%- endif %}{%- endfor %}"
    ),
    "reka": (
        "{% for m in messages %}{{ m.role if m.role in ['user', 'assistant'] else 'human' }}"
        ": {{ m.content ~ ' <sep> ' }}{% endfor %}"
    ),
    "solar": (
        "{% for m in messages %}{% if m.role == 'system' %}{% if m.content %}### System:\n{{ m.content }}"
        "\n\n{% endif %}"
        "{% elif m.role == 'user' %}### User:\n{{ m.content }}\n\n{% endif %}{% if loop.last %}"
        "### Assistant:\n{% endif %}"
        "{% endfor %}{{ undefined_name }}{{ unk_token or 'no unk' }}"
    ),
}
