#!/usr/bin/python3
"""Runs one file of pyverbs' tests as run_tests.py does, and says a line for each test that a program can read.

usage: run.py FOLDER DEVICE GID FILE [DONE...]

FOLDER holds the tests, unpacked. Tests named by DONE are left out: they were run before this process was started anew.

  @@ begin ID
  @@ ok|fail|skip ID REASON
"""

import importlib.util
import os
import sys
import unittest


class Result(unittest.TextTestResult):
    def say(self, what, test, reason=""):
        # a line of its own, whatever the C library printed
        print(f"\n@@ {what} {test.id()} {' '.join(str(reason).split())}", flush=True)

    def startTest(self, test):
        super().startTest(test)
        self.say("begin", test)

    def addSuccess(self, test):
        super().addSuccess(test)
        self.say("ok", test)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.say("skip", test, reason)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.say("fail", test, err[1])

    def addError(self, test, err):
        super().addError(test, err)
        self.say("fail", test, f"{err[0].__name__}: {err[1]}")


def flat(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from flat(test)
        else:
            yield test


def main():
    folder, device, gid, name, *done = sys.argv[1:]
    sys.path.insert(0, folder)
    sys.argv[1:] = ["--dev", device, "--port", "1", "--gid", gid]
    from args_parser import parser

    parser.parse_args()
    # the package that run_tests.py makes of the folder, without loading all of its files
    spec = importlib.util.spec_from_loader("tests", loader=None, is_package=True)
    package = importlib.util.module_from_spec(spec)
    package.__path__ = [folder]
    sys.modules["tests"] = package
    base = importlib.import_module("tests.base")
    # The address of the device's network interface stands in files that only a kernel driver makes.
    base.RDMATestCase._get_ip_mac = lambda self, dev, port, index: self.args.append(
        [dev, port, index, "127.0.0.1", "00:00:00:00:00:00"]
    )
    module = importlib.import_module("tests." + os.path.splitext(name)[0])
    tests = flat(unittest.defaultTestLoader.loadTestsFromModule(module))
    suite = unittest.TestSuite(test for test in tests if test.id() not in done)
    unittest.TextTestRunner(stream=sys.stdout, resultclass=Result).run(suite)
    print("@@ end", flush=True)


main()
