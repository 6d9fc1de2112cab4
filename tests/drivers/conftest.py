from tests.broker.conftest import rig

__all__ = ["rig"]
