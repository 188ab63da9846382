"""Refuses phrases that readers stumble over, in source, documentation, examples and recipes. Run by `make lint`.

The list is short on purpose: each entry was frequent once and has a usual word in its place. CONTRIBUTING.md explains the
language of the project.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUFFIXES = {".py", ".md", ".toml", ".yaml", ".j2", ".js", ".css"}
FOLDERS = ("packages/", "docs/", "examples/", "recipes/", "benchmarks/", "deploy/")
_THINGS = (
    "rank|process|host|image|class|step|second|epoch|embedding|line|file|folder|batch|row|identity|GPU|thread|index"
)
_COUNTED = "one|two|three|four|once|twice|images|bytes|files|threads|times|integer|number|line|folder|label|launch|row"

PHRASES = {
    r"\banew\b": "again",
    r"\bthe (one|commit) before\b": "the previous one",
    r"\b(job|training|run|ranks?|rank\(s\)) go(es)? on\b": "continue(s)",
    r"\bof before\b": "previous, earlier",
    r"\bfor ever\b": "forever, without limit",
    r"\b(nobody|somebody|everybody)\b": "name the actor: no process, another rank, the user",
    rf"\b({_COUNTED}) an? ({_THINGS})\b": "per: one per rank, images per second",
    r"\bbegins? so\b": "starts with that prefix",
    r"\bby whom\b": "name the actor",
    r"\bhe who\b|\bwho waits\b": "name the actor",
    r"\bmend(s|ed|ing)?\b": "fix, repair",
    r"\bit (knocks|hears)\b": "say what is sent or received",
    r"\bwhat is said about\b": "the message about",
    r"\bthe brake\b": "the bottleneck",
    r"\bleft to itself\b": "by default",
    r"\bwithout a word\b": "silently",
    r"\bgo(es)? on from\b": "resume(s) from",
}
# A docstring that starts with a relative clause or with "The same" leaves the reader without a subject.
DOCSTRING = re.compile(r'^\s*(?:r|f)?"""(What|Who|Which|Where|When|Whether|The same[,.])\b')


def problems(path: Path) -> list[str]:
    """Returns one line per banned phrase in the file."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        where = f"{path.relative_to(ROOT)}:{number}"
        found += [
            f"{where}: {match[0]!r}: write {better}."
            for phrase, better in PHRASES.items()
            for match in re.finditer(phrase, line, re.IGNORECASE)
        ]
        if path.suffix == ".py" and path.is_relative_to(ROOT / "packages") and (match := DOCSTRING.match(line)):
            found.append(f"{where}: a docstring starts with {match[1]!r}: start with a verb or a noun phrase.")
    return found


def main() -> int:
    """Checks every tracked text file; prints what it found and returns the exit code."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.splitlines() if "/" not in name or name.startswith(FOLDERS)]
    checked = [path for path in paths if path.suffix in SUFFIXES and path.is_file()]
    found = [problem for path in checked for problem in problems(path)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
