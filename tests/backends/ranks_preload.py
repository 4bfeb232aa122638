"""Imported last by the process that ranks are forked from."""

from tests.frozen import freeze_heap

freeze_heap()
