"""`edgevlm plan`: flags become a report, which is printed, drawn, or a document."""

import argparse
import dataclasses
import logging
from typing import Any

from builders.limits import BuildOptions, check_budget
from builders.plan_report import document, report
from edgevlm.commands.refusal import Refused
from edgevlm.errors import OverBudget


def execute(args: argparse.Namespace) -> dict[str, Any]:
    """Plan, print, draw; over budget is an error with all the figures."""
    # Remarks on how a config is spelled are for whoever builds.
    logging.getLogger("builders").setLevel(logging.ERROR)
    found = report(args.model, args.device, options_of(args), args.executor)
    if args.plot is not None:
        from builders.plot import draw

        draw(found, args.plot)
    if not args.json:
        # Tables take a seventh of the command's time, and a document needs none.
        from builders.plan_print import print_report

        print_report(found)
    try:
        check_budget(found.planned.plan, found.planned.changes)
    except OverBudget as error:
        raise Refused(error, document(found)) from error
    return document(found)


def options_of(args: argparse.Namespace) -> BuildOptions:
    """What was asked for, the usual for the rest."""
    names = [field.name for field in dataclasses.fields(BuildOptions)]
    given = {n: getattr(args, n) for n in names if getattr(args, n, None) is not None}
    return BuildOptions(**given)
