"""Runs a script in a process that is not dumpable, as one that has given up rights is not: `undumpable.py SCRIPT ARGUMENT...`, SCRIPT beside this one."""
import ctypes
import pathlib
import runpy
import sys

PR_SET_DUMPABLE = 4
assert ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
sys.argv = sys.argv[1:]
runpy.run_path(str(pathlib.Path(__file__).with_name(sys.argv[0])), run_name="__main__")
