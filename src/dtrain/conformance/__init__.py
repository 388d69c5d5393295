"""Conformance: ordinary training programs under each strategy, compared with the same program on one device.

`corpus` lists the programs, `program_runs` runs them, `verdicts` compares, `verdict_table` writes the table.
The command `dtrain conformance` (`dtrain.cli.conformance`) calls them. No training code uses this package.
"""
