"""Write the pages of docs/ that are made from the code: api.md from the docstrings, backends.md
from the capability table.

    make docs
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mla_ops
from mla_ops import capability, variables
from mla_ops.capability import ANY_DTYPE, TABLE, Row
from mla_ops.ops import PUBLIC
from mla_ops.workload import SHORT_OF

DOCS = Path(__file__).resolve().parent.parent / "docs"

MADE = "<!-- Made by build_tools/reference_pages.py: `make docs`. -->\n"


def api() -> str:
    """Return docs/api.md."""
    parts = [
        MADE,
        "# API reference\n",
        "Shape letters: B sequences, S query tokens of each, H query heads, R `kv_lora_rank`, "
        "D = R + rope width, P pages of the cache.\n",
    ]
    for name in sorted(mla_ops.__all__, key=str.lower):
        thing = getattr(mla_ops, name)
        parts.append(f"## mla_ops.{name}\n")
        parts.append(_class(name, thing) if inspect.isclass(thing) else _function(name, thing))
    parts.append("## A question\n")
    parts.append(
        "What `supports` and `explain` are asked, by keyword; in brackets what stands if not "
        "said.\n"
    )
    parts.append("```python\n" + _question() + "```\n")
    parts.append("## Ops\n")
    parts.append(
        "`torch.ops.mla.*`, made for `torch.compile`, graphs and C++. Checks, errors and results "
        "are those of the functions above.\n"
    )
    parts.append("```\n" + "\n".join(f"mla::{n}{s}" for n, s in PUBLIC.items()) + "\n```\n")
    parts.append("## Environment variables\n")
    lines = ["| variable | values | default | meaning |", "|---|---|---|---|"]
    for variable in variables.VARIABLES:
        values = ", ".join(f"`{value}`" for value in variable.values) or "path"
        lines.append(f"| `{variable.name}` | {values} | {variable.default} | {variable.meaning} |")
    parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _signature(name: str, thing: Callable[..., Any]) -> str:
    signature = inspect.signature(thing)
    parameters = []
    star = False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind == parameter.KEYWORD_ONLY and not star:
            parameters.append("*")
            star = True
        parameters.append(_parameter(parameter))
    inside = "".join(f"    {one},\n" for one in parameters)
    returns = signature.return_annotation
    text = f"{name}(\n{inside})" if inside else f"{name}()"
    return f"{text} -> {returns}" if returns is not inspect.Signature.empty else text


def _parameter(parameter: inspect.Parameter) -> str:
    """Return it as it stands in the source; inspect puts annotations that are text in quotes."""
    stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
    text = f"{stars}{parameter.name}: {parameter.annotation}"
    return text if parameter.default is parameter.empty else f"{text} = {parameter.default!r}"


def _function(name: str, thing: Callable[..., Any]) -> str:
    return f"```python\n{_signature(name, thing)}\n```\n\n{_text(thing)}"


def _class(name: str, thing: type) -> str:
    parts = [_text(thing)]
    for member, value in vars(thing).items():
        if member.startswith("_") or not inspect.getdoc(value):
            continue
        if isinstance(value, property):
            parts.append(f"**`{name}.{member}`**: {_text(value)}")
        elif callable(value):
            parts.append(
                f"```python\n{_signature(f'{name}.{member}', value)}\n```\n\n{_text(value)}"
            )
    return "\n".join(parts)


def _text(thing: object) -> str:
    """Return a docstring as Markdown: `name: ...` at the beginning of a line is a parameter."""
    paragraphs = []
    for paragraph in (inspect.getdoc(thing) or "").split("\n\n"):
        items: list[str] = []
        for line in paragraph.splitlines():
            match = re.match(r"([a-z_]+(?:, [a-z_]+)*): (.*)", line)
            if match:
                items.append(f"- `{match[1]}`: {match[2]}")
            elif items and line.startswith("    "):
                items[-1] += " " + line.strip()
            elif items:
                items.append(line)
            else:
                items.append(line.strip())
        paragraphs.append("\n".join(items))
    return "\n\n".join(paragraphs) + "\n"


def _question() -> str:
    source = inspect.getsource(capability.Question)
    return "".join(
        line.strip() + "\n" for line in source.splitlines() if re.match(r"    \w+: ", line)
    )


def backends() -> str:
    """Return docs/backends.md."""
    lines = [
        MADE,
        "# Backends and what they serve\n",
        "A call is served by the first row that takes it, in this order. `mla_ops.explain(...)` "
        "says for a problem which that is and why the rows before it are not; `backend=` or "
        "`MLA_OPS_BACKEND` restrict the choice, and what cannot be served raises. Nothing falls "
        "back silently.\n",
        "| backend | kernel | arch | q | cache | heads | query tokens | R, D | causal | LSE "
        "| cache over 4 GiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(row) for row in TABLE]
    lines += [
        "",
        '"any" is any that the op takes: 1 to 128 heads, 1 to 8 query tokens, pages of any size, '
        "bf16, fp16, fp32 and both float8 e4m3 types.\n",
        "What is known of each on which hardware is in [amd.md](amd.md) and "
        "[kernels-cpu.md](kernels-cpu.md). `python -m mla_ops doctor` says what a machine has.\n",
    ]
    # What a table can say without the machine: rows that are not part of this release.
    missing = sorted(
        {
            f"- {row.backend}, {row.kernel}: {reason}"
            for row in TABLE
            if (reason := row.missing()) is not None and "not part of this release" in reason
        }
    )
    if missing:
        lines += ["## Not in this release\n", *missing]
    return "\n".join(lines) + "\n"


def _row(row: Row) -> str:
    sizes = f"{row.kv_lora_rank}, {row.width}" if row.kv_lora_rank else "any"
    cells = (
        row.backend,
        row.kernel,
        _set(row.arch),
        _dtypes(row.q_dtype),
        _dtypes(row.cache_dtype),
        _set(row.heads),
        _set(row.q_len),
        sizes,
        "yes, no" if len(row.causal) == 2 else "yes" if True in row.causal else "no",
        "yes" if True in row.lse else "no",
        "yes" if row.cache_over_4_gib else "no",
    )
    return f"| {' | '.join(cells)} |"


def _set(values: frozenset[Any] | None) -> str:
    if values is None:
        return "any"
    if all(isinstance(value, str) for value in values):
        return ", ".join(sorted(values, key=lambda name: (len(name), name)))
    found = sorted(values)
    if len(found) > 4 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]} to {found[-1]}"
    return ", ".join(map(str, found))


def _dtypes(values: frozenset[Any]) -> str:
    return "any" if values == ANY_DTYPE else ", ".join(sorted(SHORT_OF[value] for value in values))


PAGES = {"api.md": api, "backends.md": backends}


def main() -> None:
    """Write them."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
        print(f"wrote {DOCS / name}")


if __name__ == "__main__":
    main()
