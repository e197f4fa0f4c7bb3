"""`# [shared: name]` regions are the same bytes in every script that has them."""

import re

from conftest import ROOT

SCRIPTS = sorted(path for path in ROOT.glob("*.py") if "# [shared:" in path.read_text())


def regions(path) -> dict[str, str]:
    text = path.read_text()
    found = re.findall(r"^( *)# \[shared: ([^\]]+)\]\n(.*?)^\1# \[/shared\]\n", text, re.MULTILINE | re.DOTALL)
    assert len(found) == text.count("# [shared:") == text.count("# [/shared]"), f"{path.name}: a region is not closed"
    assert len({name for _, name, _ in found}) == len(found), f"{path.name}: a name stands twice"
    return {name: body for _, name, body in found}


def test_regions_are_the_same_bytes():
    by_script = {path.name: regions(path) for path in SCRIPTS}
    names = {name for found in by_script.values() for name in found}
    for name in names:
        bodies = {script: found[name] for script, found in by_script.items() if name in found}
        assert len(bodies) > 1, f"[shared: {name}] stands in {', '.join(bodies)} alone"
        assert len(set(bodies.values())) == 1, f"[shared: {name}] differs between {', '.join(bodies)}"


def test_the_policy_scripts_share_much():
    grpo, ppo = regions(ROOT / "grpo_fsdp.py"), regions(ROOT / "ppo_fsdp.py")
    assert grpo.keys() == ppo.keys()
    lines = sum(body.count("\n") for body in grpo.values())
    assert lines > 0.4 * (ROOT / "grpo_fsdp.py").read_text().count("\n"), lines
