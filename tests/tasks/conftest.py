"""Settings of runs, as the tests of data have them."""

from tests.data.conftest import byte_dir as byte_dir
from tests.data.conftest import configure as configure
