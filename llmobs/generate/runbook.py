"""The runbook: a text for people, and the same as a page that Prometheus serves."""

import html
import re
from pathlib import Path

from markdown_it import MarkdownIt

TEXT = Path(__file__).with_name("runbook.md")
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>llmobs: runbook</title>
<style>
body {{ font: 16px/1.5 sans-serif; max-width: 50em; margin: 2em auto; padding: 0 1em; }}
h2 {{ border-top: 1px solid #ccc; padding-top: 1em; }}
h2:target {{ background: #ffef9e; }}
code {{ background: #f2f2f2; padding: 0 .2em; }}
</style></head>
<body>
{body}</body></html>
"""


def text() -> str:
    return TEXT.read_text()


def headings() -> list[str]:
    """The alerts that it has something to say of."""
    return re.findall(r"^## (\w+)$", text(), re.M)


def page() -> str:
    """As HTML. Prometheus takes its consoles for templates, so no braces may stand double."""
    body = MarkdownIt().render(text())
    body = re.sub(
        r"<h2>(\w+)</h2>", lambda m: f'<h2 id="{html.escape(m[1].lower())}">{m[1]}</h2>', body
    )
    return PAGE.format(body=body.replace("{{", "&#123;&#123;"))
