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


def check_share(share: float) -> None:
    """Raise unless some rows are meant and some stay."""
    if not 0 < share < 1:
        raise SettingError(f"share must lie between 0 and 1; found {share}.")


def share_of(client: Client, share: float) -> int:
    """So many of the client's training rows, at least one."""
    return max(1, round(share * len(client.train)))
