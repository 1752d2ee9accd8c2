# SPDX-License-Identifier: BSD-3-Clause
"""Makes a forked interpreter (forked_python.py) look as if `python ARGUMENTS` had just started it:
torch is imported when the script imports it, and os.execve() and subprocess.Popen() of a Python
make another such interpreter.

Not so: flags of the interpreter but -u, what torch reads of the environment when it is imported,
open files, and the stack under __main__."""

import builtins
import importlib.machinery
import os
import runpy
import site
import subprocess
import sys

import forked_python

HELD = ("numpy", "torch")  # packages that the child has not imported until it does
OF_MAIN = [name for name in vars(sys.modules["__main__"]) if name.startswith("__")]  # of a script
ALWAYS = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(":")]
PROCESS = subprocess.Popen
EXECVE = os.execve
OPTIONS = {"env", "stdin", "stdout", "stderr", "start_new_session"}  # of Popen()


class Giver:
    """The loader of a module that is there already. One a module, as its finders may change it."""

    def __init__(self, held, name, module):
        self._held, self._name, self._module = held, name, module
        self._own = getattr(module, "__spec__", None)  # before another takes its place

    def create_module(self, spec):
        return self._module

    def exec_module(self, module):
        if self._name in HELD:
            module.__spec__ = self._own
            self._held.give_others(self._name)
        elif "torch.optim.optimizer" in sys.modules and self._name != "torch.optim.optimizer":
            define_optimizers(self._name, module)


class Held:
    """A finder of the modules that are held back."""

    def __init__(self):
        names = [name for name in sys.modules if name.partition(".")[0] in HELD]
        self._modules = {name: sys.modules.pop(name) for name in names}  # as they were imported

    def find_spec(self, name, path=None, target=None):
        if name not in self._modules:
            return None
        return importlib.machinery.ModuleSpec(name, Giver(self, name, self._modules[name]))

    def give_others(self, package):
        """That the package imports; torch imports numpy, too."""
        packages = HELD[: HELD.index(package) + 1]
        for other, module in self._modules.items():
            if other.partition(".")[0] in packages and other not in sys.modules:
                # Not by import_module(), which would make it an attribute of its package again,
                # where that has something else of its name.
                found = (finder.find_spec(other, None) for finder in sys.meta_path)
                spec = next(filter(None, found))
                sys.modules[other] = module
                spec.loader.exec_module(module)


def define_optimizers(name, module):
    """Tells their base, as class statements do, of the optimizers that the module defines."""
    base = sys.modules["torch.optim.optimizer"].Optimizer
    for cls in vars(module).values():
        if isinstance(cls, type) and cls.__module__ == name and issubclass(cls, base):
            super(cls, cls).__init_subclass__()


class Started(BaseException):
    """Ends what runs in the place of which another Python has been started."""

    def __init__(self, arguments, environment):
        super().__init__()
        self.arguments, self.environment = arguments, environment


def execve(path, command, environment):
    if path != sys.executable:
        EXECVE(path, command, environment)
    raise Started(command[1:], environment)


class Popen(PROCESS):
    """A Python is a forked one. It is given what optfuse's commands and launchers give it."""

    address: str

    def __new__(cls, args, *others, **options):
        if args[0] != sys.executable:
            return super().__new__(cls)
        unknown = {name: value for name, value in options.items() if name not in OPTIONS and value}
        assert not others and not unknown, (others, unknown)
        words = list(args[1:])
        unbuffered = words[0] == "-u"
        request = forked_python.started(words[unbuffered:], os.getcwd(), options["env"])
        request["unbuffered"] = unbuffered
        request["session"] = options.get("start_new_session", False)
        with open(os.devnull) as nothing:
            stdin = nothing.fileno() if options.get("stdin") == subprocess.DEVNULL else 0
            out, error = options.get("stdout"), options.get("stderr")
            stdout = out.fileno() if out else 1
            stderr = stdout if error == subprocess.STDOUT else error.fileno() if error else 2
            return forked_python.Child(request, [stdin, stdout, stderr], cls.address)


def set_out(arguments):
    """sys and the environment's sitecustomize.py, as they are before __main__ runs."""
    first = "" if arguments[0] == "-c" else os.getcwd()
    if not arguments[0].startswith("-"):
        first = os.path.dirname(os.path.realpath(arguments[0]))
    words = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [first, *(words.split(os.pathsep) if words else ()), *ALWAYS]
    sys.orig_argv = [sys.executable, *arguments]
    sys.argv = [arguments[0], *arguments[2:]] if arguments[0].startswith("-") else [*arguments]
    site.execsitecustomize()


def run_main(arguments):
    main = forked_python.fresh_main()
    if "__annotations__" in OF_MAIN:  # of every __main__, in some releases of Python
        main["__annotations__"] = {}
    if arguments[0] == "-m":
        runpy._run_module_as_main(arguments[1])
    elif arguments[0] == "-c":
        exec(compile(arguments[1], "<string>", "exec"), main)
    else:
        run_file(arguments[0], main)


def run_file(path, main):
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        why = f"[Errno {error.errno}] {error.strerror}"
        said = f"{sys.executable}: can't open file {os.path.abspath(path)!r}: {why}"
        print(said, file=sys.stderr)
        raise SystemExit(2) from None
    main |= {"__file__": os.path.abspath(path), "__builtins__": builtins}
    main |= {name: None for name in OF_MAIN if name not in main}
    exec(compile(source, main["__file__"], "exec"), main)


def pretend(parent):
    """To be a child of this process; its own are its own."""
    real = os.getppid
    os.getppid = lambda: parent
    os.register_at_fork(after_in_child=lambda: setattr(os, "getppid", real))


def run(request, address):
    """request: of forked_python.started(). address: of the process that forks."""
    arguments = request["arguments"]
    pretend(request["parent"])
    if request["session"]:
        os.setsid()
    for stream in (sys.stdout, sys.stderr) if request["unbuffered"] else ():
        stream.reconfigure(write_through=True)
    Popen.address, subprocess.Popen, os.execve = address, Popen, execve
    sys.meta_path.insert(0, Held())
    sys.modules.pop("sitecustomize", None)
    modules, finders = dict(sys.modules), list(sys.meta_path)
    while True:
        try:
            set_out(arguments)
            run_main(arguments)
            return
        except Started as other:
            arguments = other.arguments
            os.environ.clear()
            os.environ.update(other.environment)
            for name in sys.modules.keys() - modules.keys():
                del sys.modules[name]
            sys.meta_path[:] = finders
