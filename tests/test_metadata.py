"""What a package index shows: the README, where no file of the repository is beside it."""

import re
import tomllib

from tests.docs.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RELATIVE = re.compile(r'\]\((?!https?:|#)[^)]*\)|src="(?!https?:)[^"]*"')


def test_the_readme_of_the_distribution_has_no_link_or_picture_of_the_repository():
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    assert "readme" in PROJECT["project"]["dynamic"]
    text = "".join((ROOT / fragment["path"]).read_text() for fragment in hook["fragments"])
    assert RELATIVE.search(text)
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    assert RELATIVE.findall(text) == []
    assert "The changelog lists what is there, the roadmap what is not." in text
    assert "[uv](https://" in text
