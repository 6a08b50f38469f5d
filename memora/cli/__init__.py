"""The command line: parses, calls, renders. Every decision is made elsewhere.

`app` knows the commands and imports the module of the one that is called; `memora --version` and `--help` load nothing
heavy.
"""
