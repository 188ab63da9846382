"""Exit codes of ranks and of whole jobs, and their description in words. Standard library only.

0    every rank ended with 0
2    the user has to change something: a wrong option or setting, a host that cannot take part; or an elastic job whose state
     was lost with the ranks that held it
74   an error that may pass, such as a full disk or a lost connection (errors.EXIT_TRY_AGAIN); a restart may help
     Also a host that does not answer any more, whether the driver or a rank notices it first
75   the ranks were asked to stop, saved, and can be resumed
255  an agent ended, or broke the protocol, before any rank failed; ssh uses the same code. Also an elastic job that ends
     because of --elastic-timeout or --reset-limit, if no rank failed since the last commit; otherwise that failure decides
134  the job hung: no rank made progress for the allowed time, and the driver has printed which rank is the culprit
128 + n  a rank, or the driver, was ended by signal n; any other code is that of the first rank that failed
"""

import signal

EXIT_USER_ERROR = 2
EXIT_RESUME_ME = 75
EXIT_HOST_LOST = 255
EXIT_HUNG = 128 + signal.SIGABRT


def exit_status(code: int) -> int:
    """Returns the exit status a shell would report: the exit code, or 128 + the signal for a negative code."""
    return code if code >= 0 else 128 - code


def is_worth_restarting(code: int) -> bool:
    """Returns False for exit codes that a restart cannot change (2) or must not follow (0 and 75)."""
    return code not in (0, EXIT_USER_ERROR, EXIT_RESUME_ME)


def how_it_ended(code: int) -> str:
    """Describes an exit code, or a negative signal number: "exit code 3", "signal SIGKILL"."""
    return f"exit code {code}" if code >= 0 else f"signal {signal_name(-code)}"


def signal_name(number: int) -> str:
    """Returns the name of a signal, or its number if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
