"""A model's chat template (jinja2), rendered as Hugging Face renders it.

Knows nothing about tokens or pictures.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from edgevlm.errors import BadParameter, BundleError


class ChatTemplate:
    """A compiled chat template. `special_tokens` are its variables `bos_token`, `eos_token`, ..."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise BundleError(f"the bundle's chat template does not compile: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The rendered text, equal to `apply_chat_template(tokenize=False)`."""
        values = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        values |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(values)
        except Exception as error:  # a template is a program: on odd messages it may raise anything
            text = str(error) or type(error).__name__
            raise BadParameter(f"the chat template refuses these messages: {text}") from None


def template_variables(source: str) -> set[str]:
    """What a chat template asks for from outside: `messages`, `tools`, ... Raises BundleError."""
    try:
        return jinja2.meta.find_undeclared_variables(_environment().parse(source))
    except jinja2.TemplateError as error:
        raise BundleError(f"the bundle's chat template does not compile: {error}") from None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja's HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(template: str) -> str:
    return datetime.datetime.now().strftime(template)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What Hugging Face's templates are written for (transformers' chat_template_utils)."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
