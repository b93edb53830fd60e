"""Results of exact mode as a table."""

from collections.abc import Sequence
from typing import Any

from fedup.bench.format import show_bytes, show_seconds
from fedup.bench.tables import markdown_table
from fedup.tasks.machine import show_commit

HEAD = [
    "data, backbone",
    "rows",
    "one round",
    "FedAvg, head",
    "fine-tuned",
    "client lies",
    "forgotten",
    "without",
    "request",
    "100 clients",
]
BACKDOOR = [
    "data, backbone",
    "led astray",
    "forgotten",
    "without",
    "accuracy",
    "forgotten",
    "without",
    "totals",
    "seconds",
]
TUNED = ["data, backbone", "rows", "learned", "rounds", "accuracy", "CPU time", "sent by clients", "client forgotten"]
COST = ["data, backbone", "features", "accuracy", "sent by clients", "store"]
ABOUT = (
    "Accuracy on the official test set (or a part of it), 10 clients, Dirichlet 0.5, one round, no rows held out. "
    "*FedAvg, head*: a linear layer on the same features by gradient steps. *Fine-tuned*: the whole "
    "backbone by FedAvg. *Client lies*: the largest client calls "
    "every class by the next one's name; it is forgotten, and compared with a head learned without it. *Request*: "
    "time from a client request to the served head, and of that on the CPU, median of 5. *100 clients*: whether the "
    "same rows at up to 100 clients (Dirichlet 0.1, empty ones left out) give the same totals, to the bit."
)


def exact_table(results: Sequence[dict[str, Any]]) -> str:
    """Files' contents as Markdown."""
    machines = {f"{each['machine']['processor']}, torch {each['machine']['torch']}" for each in results}
    commands = [
        f"- `fedup bench exact --data {each['data']} --backbone {each['backbone']} --rows {each['rows']} --test-rows "
        f"{each['test_rows']} --seed {each['seed']}{_made(each)}{_rounds(each)}`, commit {show_commit(each['code'])}; "
        f"features in {show_seconds(each['extracting_s'])} (less where they were cached); load {each['load'][0]} on "
        f"{each['load'][1]} cores while it was measured"
        for each in results
    ]
    costs = [line for each in results for line in _costs(each)]
    tuned = [line for each in results if each["fine_tuned"] for line in _tuned(each)]
    against = [
        "Against training the whole backbone by FedAvg, on the same rows of the same clients, for few rounds. CPU time "
        "is of one core; that of the two heads has the features of all rows, of test rows and of the backdoor, too. "
        "*Client forgotten* is what it takes to be without a client: training again takes as long as training.",
        markdown_table(TUNED, tuned),
    ]
    return "\n\n".join(
        [
            "# Exact mode",
            ABOUT,
            markdown_table(HEAD, [_row(each) for each in results]),
            "A backdoor: 40 % of the rows of three clients carry a trigger and a wrong label, and are forgotten as "
            "samples. *Led astray*: test images or texts with the trigger that are answered so.",
            markdown_table(BACKDOOR, [_backdoor(each) for each in results]),
            *(against if tuned else []),
            "Fewer features by a public random projection, or more by random ones behind them:",
            markdown_table(COST, costs),
            f"n = 1 for each line; {'; '.join(sorted(machines))}.",
            "\n".join(commands),
        ]
    )


def _rounds(result: dict[str, Any]) -> str:
    return f" --fine-tune {result['fine_tuned']['rounds']}" if result["fine_tuned"] else ""


def _made(result: dict[str, Any]) -> str:
    return f" --features {result['features']}" if _has_made_features(result) else ""


def _has_made_features(result: dict[str, Any]) -> bool:
    return bool(result["features"] != result.get("backbone_features", result["features"]))


def _name(result: dict[str, Any]) -> str:
    made = f", {result['features']:,} features" if _has_made_features(result) else ""
    return f"{result['data']}, {result['backbone']}{made}"


def _with_rows(result: dict[str, Any]) -> str:
    return f"{_name(result)}, {result['rows']:,} rows"


def _row(result: dict[str, Any]) -> list[str]:
    learned, flipping, many = (result[name] for name in ("learned", "flipping", "many_clients"))
    shares = [f"{flipping[state]['accuracy']:.3f}" for state in ("with", "forgotten", "learned_without")]
    fedavg = f"{result['fedavg']['accuracy']:.3f} ({result['fedavg']['rounds']} rounds)"
    equal = f"{'equal' if many['equal'] else 'DIFFERENT'} ({many['clients']})"
    tuned = result["fine_tuned"]
    whole = f"{tuned['accuracy']:.3f} ({tuned['rounds']} rounds, {show_seconds(tuned['time_s'])})" if tuned else "–"
    first = [_name(result), f"{result['rows']:,}", f"{learned['accuracy']:.3f}", fedavg, whole]
    cpu = f" ({show_seconds(learned['request_cpu_s'])} CPU)" if "request_cpu_s" in learned else ""
    return [*first, *shares, f"{show_seconds(learned['request_s'])}{cpu}", equal]


def _backdoor(result: dict[str, Any]) -> list[str]:
    own, states = result["backdoor"], ("with", "forgotten", "learned_without")
    shares = [f"{own[state][key]:.3f}" for key in ("led_astray", "accuracy") for state in states]
    equal = "equal" if own["equal"] else "DIFFERENT"
    return [_with_rows(result), *shares, f"{equal}, {own['claim']}", show_seconds(own["time_s"])]


def _tuned(result: dict[str, Any]) -> list[list[str]]:
    learned, head, whole = (result[name] for name in ("learned", "fedavg", "fine_tuned"))
    features, lines = result.get("extracting_cpu_s", 0.0), []
    ways = [("exact head", 1, learned, features), ("FedAvg, head", head["rounds"], head, features)]
    for name, rounds, own, before in [*ways, ("FedAvg, whole backbone", whole["rounds"], whole, 0.0)]:
        again = (
            learned.get("request_cpu_s", learned["request_s"]) if own is learned else own.get("cpu_s", own["time_s"])
        )
        cost = [
            show_seconds(own.get("cpu_s", own["time_s"]) + before),
            show_bytes(own["bytes_up"]),
            show_seconds(again),
        ]
        lines.append([_name(result), f"{result['rows']:,}", name, str(rounds), f"{own['accuracy']:.3f}", *cost])
    return lines


def _costs(result: dict[str, Any]) -> list[list[str]]:
    whole = {"features": result["features"], **result["learned"]}
    return [
        [
            _with_rows(result),
            str(each["features"]),
            f"{each['accuracy']:.3f}",
            show_bytes(each["bytes_up"]),
            show_bytes(each["store_bytes"]),
        ]
        for each in (*result["projections"], whole)
    ]
