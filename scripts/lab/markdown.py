"""markdown.py: the tables of the report as Markdown (results.md)."""

from .table import as_markdown


def page(r, sections):
    t = r["training"]
    steps = f"{int(t['steps'])} steps of {int(t['total-batch'])}{' at the end' if r['runs'][0]['changes'] else ''}"
    parts = [
        f"# {r['title']}\n",
        f"{r['tokens'] / 1e6:.4g}M tokens per run, {steps}. Reference: {r['arms'][r['reference']]}.\n",
        *(f"* {note}\n" for note in r["notes"]),
    ]
    for name, heading, tables in sections:
        if tables and name != "runs":
            parts.append(f"## {heading}\n")
            parts += [as_markdown(table) + (f"\n{table.caption}\n" if table.caption else "") for table in tables]
    return "\n".join(parts)
