"""A script that starts its workers when it is imported, as the check must not."""

from __future__ import annotations

from rayhelper import RayHelper


@RayHelper.worker(group="train")
class Started:
    @RayHelper.function(group="train")
    def size(self) -> int:
        return 1

    def run(self) -> int:
        return 2 * self.size()  # finding: none-value-used


def main() -> None:
    RayHelper.initialize('{"one": {"device": "CPU", "ranks": 1, "workers": ["train"]}}')
    print(Started().run())


main()  # finding: initialize-on-import
with RayHelper.session({}):  # finding: initialize-on-import
    pass
raise AssertionError("the check imported a module that starts workers")
