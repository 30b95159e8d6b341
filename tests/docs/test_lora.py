"""The LoRA lines of the pages find modules in every policy that they are for, and the README's trains."""

import re
import shlex

import pytest

from tests.docs.pages import ROOT

PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGETS = sorted(
    {found for page in PAGES for found in re.findall(r"--peft\.target_modules='([^']+)'", page.read_text())}
)


@pytest.mark.parametrize("policy_type", ["smolvla", "pi0_fast", "pi0", "pi05"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_policy_has_modules_of_these_names(target, policy_type, teachers):
    found = [name for name, _ in teachers(policy_type).policy.named_modules() if re.fullmatch(target, name)]
    assert found
    assert not [name for name in found if "vision" in name]


def test_the_readmes_line_trains_a_smolvla(train_flags, craft_train, tmp_path):
    (line,) = re.findall(
        r'^craft train "\$\{RUN\[@\]\}" (.*--peft(?:.*\\\n)?.*)$', (ROOT / "README.md").read_text(), re.M
    )
    typed = [word for word in shlex.split(line.replace("\\\n", " ")) if not word.startswith("--output_dir=")]
    assert [word for word in typed if word.startswith("--peft.")]
    own = ["--craft.enabled=true", "--craft.old_instructions=open the drawer", "--craft.num_anchors=8"]
    assert craft_train(*train_flags("smolvla", tmp_path / "run", steps=2), *own, *typed) == 0
    assert list((tmp_path / "run" / "checkpoints" / "last" / "pretrained_model").glob("adapter_model*"))
