"""chat.py: conversations, {"messages": [{"role", "content"}, ...]}, as text, by a tokenizer's chat template.

What the template adds to the messages before when a message of the assistant follows, beyond the prompt for it, counts
as targets: its content and the token that ends it. A template that writes earlier messages differently when others
follow has no such parts, and its conversation is refused.
"""

import functools
import json
import os
import re
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox
from sources import BadInput, first_line, hub

ROLES = ("system", "user", "assistant", "tool")
TOKENS = ("bos_token", "eos_token")  # of a tokenizer, which its template may write


class Conversation(str):
    """The text; spans: (begin, end) of the characters that count."""

    spans = ()


def settings_of(tokenizer, file):
    """The text of a file beside a tokenizer.json, or of its repository of the Hub; None: there is none."""
    if os.path.exists(tokenizer):
        path = Path(tokenizer).resolve().parent / file
        return path.read_text(encoding="utf-8") if path.exists() else None
    if tokenizer in ("bytes", "gpt2"):
        return None
    try:
        return Path(hub().hf_hub_download(tokenizer, file)).read_text(encoding="utf-8")
    except Exception as error:  # of the library
        from huggingface_hub import errors

        if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
            return None
        raise BadInput(f"cannot read {file} of --tokenizer {tokenizer} on the Hub: {first_line(error)}") from None


def find_chat(tokenizer, template):
    """The Chat of a tokenizer. template: a file; None: the tokenizer's."""
    token = lambda value: value["content"] if isinstance(value, dict) else value or ""
    try:
        settings = json.loads(settings_of(tokenizer, "tokenizer_config.json") or "{}")
        tokens = {k: token(settings.get(k)) for k in TOKENS}
        if template:
            text = Path(template).read_text(encoding="utf-8")
        else:
            text = settings_of(tokenizer, "chat_template.jinja") or settings.get("chat_template")
        if isinstance(text, list):  # several by name
            text = next((t["template"] for t in text if t["name"] == "default"), None)
        if not all(isinstance(value, str) for value in (text or "", *tokens.values())):
            raise TypeError
    except (OSError, ValueError) as error:
        raise BadInput(f"{template or tokenizer}: {first_line(error)}") from None
    except (AttributeError, KeyError, TypeError, RecursionError):
        raise BadInput(f"the tokenizer_config.json of --tokenizer {tokenizer} is damaged") from None
    if not text:
        raise BadInput(f"--tokenizer {tokenizer} has no chat template: give --chat-template FILE")
    return Chat(text, tokens)


def strings_of(value):
    """The strings of a JSON value, with its keys."""
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, (dict, list)):
            rest += [*value, *value.values()] if isinstance(value, dict) else value


class Generation(jinja2.ext.Extension):
    """{% generation %} around what the assistant says, by which templates mark the targets: here it is text alone."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True), lineno=line)


class Chat:
    special = ()  # texts of tokens that messages must not have

    def __init__(self, text, tokens):
        """text: the template; tokens: {name of TOKENS: text}"""
        self.text, self.tokens = text, {name: tokens.get(name, "") for name in TOKENS}
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        environment.globals["raise_exception"] = self.refuse
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # as Transformers
        try:
            self.template = environment.from_string(self.text)
        except (jinja2.TemplateError, RecursionError) as error:
            raise BadInput(f"the chat template is not valid: {first_line(error)}") from None

    def refuse(self, text):
        raise jinja2.TemplateError(text)

    def render(self, messages, prompt):
        try:
            return self.template.render(messages=messages, add_generation_prompt=prompt, **self.tokens)
        except Exception as error:  # whatever the template does
            raise ValueError(f"is refused by the chat template: {first_line(error)}") from None

    def turn_end(self):
        """The first special token that the template writes after an answer; None: it writes none."""
        say = lambda role, text: {"role": role, "content": text}
        try:
            end = self.render([say("user", "Question"), say("assistant", "Answer")], False).rpartition("Answer")[2]
        except ValueError:
            return None
        found = [(end.index(token), -len(token), token) for token in self.special if token and token in end]
        return min(found)[2] if found else None

    def check(self, messages, last="assistant"):
        """What is wrong with the messages; None: nothing."""
        if not isinstance(messages, list) or not messages:
            return "has no list of messages"
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                return f"has no role in message {number + 1}"
            if message["role"] not in ROLES:
                return f"has the unknown role {message['role'][:40]!r}: known are {', '.join(ROLES)}"
            if not isinstance(message.get("content"), str):
                return f"has no text as content of message {number + 1}"
            for text in strings_of(message):
                if re.search("[\ud800-\udfff]", text):
                    return f"has an unpaired surrogate in message {number + 1}"
                for token in self.special:
                    if token in text:
                        return f"has the special token {token} in message {number + 1}"
        if all(message["role"] != last for message in messages):
            return f"has no message of the {last}"
        return None

    def conversation(self, messages):
        """The text of the messages. Raises ValueError: what is wrong with them."""
        wrong = self.check(messages)
        if wrong:
            raise ValueError(wrong)
        text, spans = "", []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before, after = self.render(messages[:i], True), self.render(messages[: i + 1], False)
                if not before.startswith(text) or not after.startswith(before):
                    raise ValueError(f"is written differently by the chat template with message {i + 1}")
                spans.append((len(before), len(after)))
                text = after
        whole = Conversation(self.render(messages, False))
        if not whole.startswith(text):
            raise ValueError("is written differently by the chat template with its last message")
        whole.spans = spans
        return whole

    def prompt(self, messages):
        """The text that the next message of the assistant follows. Raises ValueError."""
        last = messages[-1] if isinstance(messages, list) and messages else None
        wrong = self.check(messages, last.get("role") if isinstance(last, dict) else None)
        if wrong:
            raise ValueError(wrong)
        return Conversation(self.render(messages, True))
