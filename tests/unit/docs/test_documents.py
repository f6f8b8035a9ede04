"""Documents stay true: generated pages are current, links lead somewhere, nothing is promised that is not there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    page
    for pattern in ("*.md", "bench/**/*.md", "docs/**/*.md", "models/**/*.md", "clients/**/*.md", "loadtest/**/*.md")
    for page in PROJECT.glob(pattern)
)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
TEST_FILES = re.compile(r"\btests/(?>[\w./]*\w)(?!<)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the headings: lower case, spaces as hyphens, everything else but letters left out."""
    headings = HEADING.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in LINK.finditer(CODE.sub("", page.read_text())):
            target, anchor = link["target"], link["anchor"]
            if target and target.startswith(("http://", "https://", "mailto:")):
                continue
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name} links to #{anchor} of {linked.name}"


def test_each_decision_has_a_number_of_its_own() -> None:
    decisions = sorted((PROJECT / "docs" / "adr").glob("*.md"))
    assert [int(page.name[:3]) for page in decisions] == list(range(len(decisions)))
    for page in decisions[1:]:
        assert page.read_text().startswith(f"# ADR-{page.name[:3]}: "), page.name


def known_modules() -> set[str]:
    return {
        str(path.relative_to(PROJECT).with_suffix("")).replace("/", ".").removesuffix(".__main__")
        for folder in ("bench", "loadtest", "services")
        for path in (PROJECT / folder).rglob("*.py")
    }


def known_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))


def known_in(reference: str, pattern: str) -> set[str]:
    return set(re.findall(pattern, (PROJECT / "docs" / "reference" / reference).read_text()))


def known_to_tests() -> set[str]:
    """The variables that say where programs are, what and how much is tested, and whether a test may be left out."""
    names = (
        "programs.py",
        "cluster/conftest.py",
        "cluster/run",
        "cluster/test_cold_starts.py",
        "e2e/test_clients.py",
        "e2e/test_open_responses.py",
        "integration/gateway/test_usage_faults.py",
    )
    read = "".join((PROJECT / "tests" / name).read_text() for name in names)
    return set(re.findall(r"\bRYZANSTEIN_(?:TEST_\w+|REQUIRE\b)", read))


def suffixes_removed(metrics: set[str]) -> set[str]:
    """Histograms are listed without the endings that they are scraped with."""
    return {re.sub(r"_(bucket|sum|count)$", "", metric) for metric in metrics}


def test_commands_variables_and_metrics_exist() -> None:
    """Names in pages exist: commands, settings, metrics and files."""
    known = {
        "python -m": known_modules(),
        "make": known_targets(),
        "variable": known_in("configuration.md", r"`(RYZANSTEIN_\w+)`") | {"RYZANSTEIN_API_KEY"} | known_to_tests(),
        "metric": known_in("metrics.md", r"`(ryzanstein_\w+)`"),
    }
    for page in PAGES:
        text = page.read_text()
        missing = {kind: names - known[kind] for kind, names in named_in(text).items()}
        missing["tests"] = {name for name in TEST_FILES.findall(text) if not (PROJECT / name).exists()}
        assert not any(missing.values()), f"{page.name} names what is not there: {missing}"


def named_in(text: str) -> dict[str, set[str]]:
    """The names in a page, by kind."""
    return {
        "python -m": set(re.findall(r"python -m ((?:bench|loadtest|services)[\w.]*\w)", text)),
        "make": set(re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE)),
        "variable": set(re.findall(r"\bRYZANSTEIN_[A-Z_]*[A-Z]\b(?!_?\*)", text)),
        "metric": suffixes_removed(
            set(re.findall(r"\bryzanstein_(?:gateway|router|coordinator|worker)_\w+", text)),
        ),
    }


def test_the_reference_is_current() -> None:
    """`make reference` writes it anew."""
    build = PROJECT / "docs" / "reference" / "build.py"
    checked = subprocess.run([sys.executable, str(build), "--check"], cwd=PROJECT, check=False, timeout=300)
    assert checked.returncode == 0, "run `make reference`"


RECIPES = re.compile(r"^### (?P<what>.+)\n(?P<steps>(?:(?!#).*\n?)+)", re.MULTILINE)


def test_the_files_of_a_recipe_exist() -> None:
    """`<name>` stands for what the contributor writes: its folder must be there."""
    for recipe in RECIPES.finditer((PROJECT / "CONTRIBUTING.md").read_text()):
        steps = re.findall(r"^(\d+)\. ", recipe["steps"], re.MULTILINE)
        assert steps == [str(number) for number in range(1, len(steps) + 1)]
        files = re.findall(r"`([\w./<>]+/[\w.<>-]+)`", recipe["steps"])
        assert len(files) >= len(steps) / 2, "steps name files"
        for file in files:
            path = PROJECT / file
            assert path.parent.is_dir() if "<" in path.name else path.exists(), f"{recipe['what']}: {file}"


def test_every_dependency_has_its_reason() -> None:
    import tomllib

    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    reasons = (PROJECT / "docs" / "dependencies.md").read_text()
    wanted = project["dependencies"] + [need for group in project["optional-dependencies"].values() for need in group]
    names = {re.split(r"[\[<>=~! ]", need, maxsplit=1)[0] for need in wanted} - {"ryzanstein"}
    missing = {name for name in names if not _is_named(name, reasons)}
    assert not missing, f"docs/dependencies.md gives no reason for {sorted(missing)}"


def _is_named(name: str, reasons: str) -> bool:
    """`opentelemetry-exporter-x` may be written as `-exporter-x` after its family; type stubs are one entry."""
    family, _, rest = name.partition("-")
    return name in reasons or (f"-{rest}" in reasons and family in reasons) or name.startswith("types-")


def test_pages_install_the_package_from_a_clone() -> None:
    """No index has it."""
    pages = [
        page for page in [*PAGES, *PROJECT.glob("charts/**/*.md"), *PROJECT.glob("deploy/**/*.md")] if page.exists()
    ]
    named = re.compile(r"pip install (?!.*--(?:no-index|find-links))[^`\n]*(?<![\w/.-])ryzanstein\b")
    assert [f"{page.name}: {match[0]}" for page in pages for match in named.finditer(page.read_text())] == []
