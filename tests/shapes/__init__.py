import pytest

pytest.register_assert_rewrite("tests.shapes.check")
