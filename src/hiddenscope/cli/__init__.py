"""The `hiddenscope` command: parse, call, print.

Results go to stdout, progress and errors to stderr.
"""
