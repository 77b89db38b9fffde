# SPDX-License-Identifier: Apache-2.0
"""Renders chat templates in a process of its own: a template is a stranger's code.

Run as a program: it reads one JSON object a line, {"template", "variables"}, and answers with one,
{"text"} or {"error"}. Its sandbox gives a template no attribute of Python's own and no file; its
memory is limited here, its time by who waits for it. Imports nothing of ours.
"""

import datetime
import json
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

MAX_MEMORY_BYTES = 2**30
MAX_CHARACTERS = 16 * 2**20


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said; here it is only what is inside."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def raise_exception(message: str) -> None:
    """What templates call to refuse a conversation."""
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def tojson(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    """JSON as the Hub's templates expect it: nothing is escaped for HTML.

    `layout`: indent, separators and sort_keys, as the json module has them.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def environment() -> jinja2.Environment:
    """Returns the sandbox, with what the Hub's templates may use."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, GenerationTag],
    )
    made.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    made.filters["tojson"] = tojson
    return made


def render(made: jinja2.Environment, template: str, variables: dict[str, Any]) -> str:
    """Returns the rendered text; raises ValueError when it is too long."""
    parts, length = [], 0
    for part in made.from_string(template).generate(**variables):
        parts.append(part)
        length += len(part)
        if length > MAX_CHARACTERS:
            raise ValueError(f"it wrote more than {MAX_CHARACTERS} characters")
    return "".join(parts)


def limit_memory() -> None:
    """Makes an allocation beyond the limit fail here, where the system can do that."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    except (ImportError, ValueError, OSError):
        return


def main() -> None:
    limit_memory()
    made = environment()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"text": render(made, asked["template"], asked["variables"])}
        except MemoryError:
            answer = {"error": f"it took more than {MAX_MEMORY_BYTES >> 20} MiB of memory"}
        except RecursionError:
            answer = {"error": "it calls itself too deeply"}
        except Exception as error:  # whatever a template does wrong is the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
