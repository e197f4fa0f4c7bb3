"""The README's implementation details are the scripts' DETAIL comments. Written anew by: python tests/test_readme.py"""

import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADING = "## Implementation details\n\n"


def comments(path: Path) -> list[str]:
    """The blocks of comments of a file: lines that follow each other, or one at the end of a line of code."""
    blocks, last = [], -1
    with path.open() as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                alone = token.line.strip().startswith("#")
                text = token.string.removeprefix("#").strip()
                if alone and token.start[0] == last + 1:
                    blocks[-1] += f" {text}"
                else:
                    blocks.append(text)
                last = token.start[0] if alone else -1
    return blocks


def details() -> dict[str, list[str]]:
    """What each DETAIL comment says, to the next one or the end of its block -> the files that say it."""
    found: dict[str, list[str]] = {}
    for path in (*sorted(ROOT.glob("*.py")), *sorted(ROOT.glob("utils/[!t]*.py"))):  # without the embedded task, tiny
        for block in comments(path):
            for detail in block.split("DETAIL: ")[1:]:
                name = str(path.relative_to(ROOT))
                files = found.setdefault(detail.strip().rstrip("."), [])
                files += [] if name in files else [name]
    return found


def section() -> str:
    said = [f"* {', '.join(f'`{f}`' for f in files)}: {detail}\n" for detail, files in details().items()]
    grep = (
        "Every choice that changes numbers: `grep -n DETAIL *.py utils/*.py` (but for those of the embedded task).\n\n"
    )
    return HEADING + grep + "".join(said) + "\n"


def test_the_details_are_the_scripts_own():
    assert len(details()) > 20
    assert section() in (ROOT / "README.md").read_text(), "python tests/test_readme.py writes them anew"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(HEADING)
    readme.write_text(before + section() + rest[rest.index("## ") :])
