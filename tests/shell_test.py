"""The manual and the completion, as a shell has them: in a terminal, with Tab pressed.

zsh and fish take part where they are installed."""

import os
import pty
import re
import select
import shutil
import subprocess
import time

import pytest

PROGRAM = os.path.abspath("cli/signpost")


def run(*arguments):
    return subprocess.run([PROGRAM, *arguments], check=True, capture_output=True, text=True).stdout


def commands(*command):
    """Every command, those below others too, with its --help."""
    text = run(*command, "--help")
    yield list(command), text
    below = text.partition("\nSubcommands:\n")[2].partition("\n\n")[0]
    for name in re.findall(r"^  ([\w-]+)", below, re.MULTILINE):
        yield from commands(*command, name)


def rendered(page):
    """As man(1) shows it on a wide screen, in one line."""
    text = subprocess.run(
        ["mandoc", "-T", "ascii", "-O", "width=1000"],
        input=page,
        check=True,
        capture_output=True,
        text=True,
    )
    return " ".join(re.sub(".\b", "", text.stdout).split())


@pytest.mark.parametrize("command", [[], *[[c[0]] for c, _ in commands() if len(c) == 1]], ids=str)
def test_the_manual_is_good_roff(command):
    page = run("man", *command)
    lint = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning"], input=page, capture_output=True, text=True
    )
    # It has no date, so that the same program writes the same manual.
    assert [line for line in lint.stdout.splitlines() if "missing date" not in line] == []


def test_the_manual_has_each_command_and_flag_of_the_help():
    page = rendered(run("man"))
    known = list(commands())
    assert len(known) > 25
    for command, text in known:
        assert " ".join(["signpost", *command]) in page
        for flag in re.findall(r"^  (?:-\w,)?(--[\w-]+)", text, re.MULTILINE):
            assert flag == "--help" or f"{flag} " in page, (command, flag)


class Terminal:
    """A shell in a terminal of its own, in `directory`."""

    def __init__(self, argv, directory, environment):
        self.process, self.terminal = pty.fork()
        if self.process == 0:
            os.chdir(directory)
            os.environ.update(
                environment, TERM="dumb", PS1="$ ", COLUMNS="200", HOME=str(directory)
            )
            os.execvp(argv[0], argv)
        self.text = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.kill(self.process, 9)
        os.waitpid(self.process, 0)
        os.close(self.terminal)

    def type(self, keys):
        os.write(self.terminal, keys.encode())

    def wait_for(self, pattern):
        """Reads until the text has it, and forgets it up to there."""
        deadline = time.monotonic() + 20
        while not (found := re.search(pattern, self.text, re.DOTALL)):
            ready, _, _ = select.select([self.terminal], [], [], deadline - time.monotonic())
            assert ready, f"waited for {pattern!r}, got {self.text!r}"
            self.text += os.read(self.terminal, 65536).decode(errors="replace")
        self.text = self.text[found.end() :]
        return found


SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
LOADS = {
    "bash": "source <(signpost completion bash)",
    "zsh": "autoload -U compinit && compinit -u -D && source <(signpost completion zsh)",
    "fish": "signpost completion fish | source",
}
installed = [shell for shell in SHELLS if shutil.which(shell)]


@pytest.fixture(params=installed)
def shell(request, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "signpost").symlink_to(PROGRAM)
    (tmp_path / "bin" / "telltale").write_text('#!/bin/sh\nprintf "<%s>" "$@"; echo "<end>"\n')
    (tmp_path / "bin" / "telltale").chmod(0o755)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "chapter.txt").touch()
    (tmp_path / "lonely.txt").touch()
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    with Terminal(SHELLS[request.param], tmp_path, {"PATH": path}) as terminal:
        terminal.type(LOADS[request.param] + "; telltale loaded\n")
        terminal.wait_for("<loaded><end>")
        terminal.name = request.param
        yield terminal


# What is typed, and what the words are once Tab and Enter have been pressed.
TYPED = {
    "signpost che": "checkpoint",
    "signpost cert is": "cert|issue",
    "signpost run --per": "run|--per-node",
    "signpost bench exchange --codec o": "bench|exchange|--codec|onebit",
    "signpost bench exchange --codec=o": "bench|exchange|--codec=onebit",
    "signpost chaos --faults kill,r": "chaos|--faults|kill,reset",
    "signpost status --aggregators 10.0.0.1:4000 --wa": "status|--aggregators|10.0.0.1:4000|--watch",
    "signpost cert show ch": "cert|show|checkpoints",  # and not chapter.txt
    "signpost aggregator --state-dir=ch": "aggregator|--state-dir=checkpoints",
    "signpost demo --text lo": "demo|--text|lonely.txt",
    "signpost run -n 2 -- telltale lo": "run|-n|2|--|telltale|lonely.txt",
}


@pytest.mark.parametrize("typed", TYPED)
def test_tab_completes(shell, typed):
    shell.type(f"{typed}\t")
    # Ctrl-A, and the program's name becomes that of one that shows its arguments.
    shell.type("\x01telltale \x05\n")
    found = shell.wait_for(r"<signpost>(.*?)<end>")
    assert found[1].replace("><", "|").strip("<>").rstrip("/") == TYPED[typed]


def test_tab_offers_what_there_is(shell):
    # bash wants to hear it twice; to zsh the second one means "the first of these", and to fish on a
    # terminal as simple as this one, which does not show them.
    shell.type("signpost cert issue --role \t" + ("" if shell.name == "zsh" else "\t"))
    if shell.name == "fish":
        shell.wait_for("--role admin")
    else:
        shell.wait_for(r"(?=.*\baggregator\b)(?=.*\bworker\b)(?=.*\bobserver\b)(?=.*\badmin\b)")
