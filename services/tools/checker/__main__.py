"""Says what can be served: `python -m services.tools.checker`, which `ryzanstein models` and `check` start.

Ends with 0 if the model can be served with every asked number of ranks, with 3 if with some of them, otherwise with 1.
"""

from __future__ import annotations

import argparse
import json
import sys

from services.tools.checker.families import list_models, models_text
from services.tools.checker.report import check, report_text

SERVED, REFUSED, PARTLY = 0, 1, 3


def main() -> int:
    """Run the command line; returns the exit status."""
    args = _parser().parse_args()
    if args.command == "models":
        models = list_models()
        print(json.dumps(models.as_json(), indent=2) if args.json else models_text(models))  # noqa: T201
        return SERVED
    report = check(args.model, [int(count) for count in args.ranks.split(",")], args.device)
    print(json.dumps(report.as_json(), indent=2) if args.json else report_text(report))  # noqa: T201
    if report.problems or not any(not rank_report.problem for rank_report in report.ranks):
        return REFUSED
    return PARTLY if any(rank_report.problem for rank_report in report.ranks) else SERVED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m services.tools.checker", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    models = commands.add_parser("models")
    checked = commands.add_parser("check")
    checked.add_argument("model")
    checked.add_argument("--ranks", default="1")
    checked.add_argument("--device", default="auto")
    for command in (models, checked):
        command.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
