"""The command line `lapwing`: a network, its checkpoint and data in, figures and files out (the extra `cli`).

    lapwing fit nets:make --weights net.pt --data train.npz --likelihood classification --out net.fit

Exit codes:  0    done
             1    a finding: the doctor says that something stands in the way of a fit
             2    an error, in one line: usage, a file, a module, data, a fit that failed
             130  interrupted
"""

import sys


def main() -> None:
    """Run the command line; one line and exit code 2 where its extra is not installed."""
    try:
        from lapwing.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"error: lapwing's command line needs {error.name}; pip install 'lapwing[cli]'", file=sys.stderr)
        sys.exit(2)
    app()
