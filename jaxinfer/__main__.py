"""`python -m jaxinfer`, where the `jaxinfer` script is not on the path."""

import sys

from jaxinfer.cli import main

sys.exit(main())
