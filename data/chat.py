"""chat.py: conversations, {"messages": [{"role", "content"}, ...]}, as text, by a tokenizer's chat template.

What the template adds to the messages before when a message of the assistant follows, beyond the prompt for it, counts
as targets: its content and the token that ends it. A template that writes earlier messages differently when others
follow has no such parts, and its conversation is refused.
"""

import json
import os
from pathlib import Path

import jinja2
import jinja2.sandbox
from sources import BadInput, first_line, hub

ROLES = ("system", "user", "assistant", "tool")


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
    except Exception:  # of the library: the repository does not have it
        return None


class Chat:
    special = ()  # texts of tokens that contents must not have

    def __init__(self, tokenizer, template):
        """template: a file; None: the tokenizer's."""
        try:
            settings = json.loads(settings_of(tokenizer, "tokenizer_config.json") or "{}")
            if template:
                self.text = Path(template).read_text(encoding="utf-8")
            else:
                self.text = settings_of(tokenizer, "chat_template.jinja") or settings.get("chat_template")
        except (OSError, ValueError) as error:
            raise BadInput(f"{template or tokenizer}: {first_line(error)}") from None
        if isinstance(self.text, list):  # several by name
            self.text = next((t["template"] for t in self.text if t["name"] == "default"), None)
        if not self.text:
            raise BadInput(f"--tokenizer {tokenizer} has no chat template: give --chat-template FILE")
        token = lambda value: value["content"] if isinstance(value, dict) else value
        self.tokens = {k: token(settings.get(k)) or "" for k in ("bos_token", "eos_token")}
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = self.refuse
        try:
            self.template = environment.from_string(self.text)
        except jinja2.TemplateError as error:
            raise BadInput(f"the chat template is not valid: {first_line(error)}") from None

    def refuse(self, text):
        raise jinja2.TemplateError(text)

    def render(self, messages, prompt):
        return self.template.render(messages=messages, add_generation_prompt=prompt, **self.tokens)

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
            for token in self.special:
                if token in message["content"]:
                    return f"has the special token {token} in message {number + 1}"
        if all(message["role"] != last for message in messages):
            return f"has no message of the {last}"
        return None

    def conversation(self, messages):
        """The text of the messages. Raises ValueError: what is wrong with them."""
        wrong = self.check(messages)
        if wrong:
            raise ValueError(wrong)
        try:
            text, spans = "", []
            for i, message in enumerate(messages):
                if message["role"] == "assistant":
                    before, after = self.render(messages[:i], True), self.render(messages[: i + 1], False)
                    if not before.startswith(text) or not after.startswith(before):
                        raise ValueError(f"is written differently by the chat template with message {i + 1}")
                    spans.append((len(before), len(after)))
                    text = after
            whole = Conversation(self.render(messages, False))
        except jinja2.TemplateError as error:
            raise ValueError(f"is refused by the chat template: {first_line(error)}") from None
        if not whole.startswith(text):
            raise ValueError("is written differently by the chat template with its last message")
        whole.spans = spans
        return whole

    def prompt(self, messages):
        """The text that the next message of the assistant follows. Raises ValueError."""
        wrong = self.check(messages, messages[-1].get("role") if messages and isinstance(messages[-1], dict) else None)
        if wrong:
            raise ValueError(wrong)
        try:
            return Conversation(self.render(messages, True))
        except jinja2.TemplateError as error:
            raise ValueError(f"is refused by the chat template: {first_line(error)}") from None
