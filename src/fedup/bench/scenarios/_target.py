from fedup.errors import SettingError
from fedup.federation import Client, Federation


def target_client(federation: Federation, wanted: int | None) -> Client:
    """The client that a scenario is about: the one named, or the largest."""
    if wanted is None:
        return max(federation.clients, key=lambda client: len(client.train))
    if wanted not in federation.ids:
        raise SettingError(
            f"client: there is no client {wanted}; there are {federation.ids[0]} … {federation.ids[-1]}."
        )
    return federation.client(wanted)
