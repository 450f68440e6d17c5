"""`python -m support.forked_demo ...` is `wsync demo ...` of which all processes are forked: the
engines', too, by the nursery that this one comes from."""

import sys

from support import nursery

from wsync.demo import cli

if __name__ == "__main__":
    nursery.install()
    sys.exit(cli.main(sys.argv[1:]))
