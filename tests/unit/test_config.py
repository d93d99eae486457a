"""The configuration: every problem at once, overrides, rules, round trips, shipped files."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.config import (
    Config,
    config_from_mapping,
    config_problems,
    config_schema,
    config_to_toml,
    load_config,
)
from echo2.errors import ConfigError
from echo2.toml_text import toml_document

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.toml"))


def problems_of(tables: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(tables)
    return caught.value.problems


def a_file(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_five_mistakes_are_told_at_once_each_with_key_value_allowed_and_nearest(
    tmp_path: Path,
) -> None:
    path = a_file(
        tmp_path,
        """
        [staleness]
        late = "wiat"
        max = -1
        [learner]
        step = 300
        learning_rate = "2e-4"
        [sampling]
        top_p = 1.5
        """,
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    told = "\n".join(sorted(caught.value.problems))
    assert len(caught.value.problems) == 5
    assert (
        'staleness.late = "wiat": allowed is "wait", "drop" or "mask"; did you mean "wait"?' in told
    )
    assert "staleness.max = -1: allowed is an integer from 0 to 1000" in told
    assert "learner.step = 300: no such setting; did you mean learner.steps?" in told
    assert "[learner] knows steps, groups_per_step" in told
    assert (
        'learner.learning_rate = "2e-4": allowed is a number above 0 and at most 10; '
        "did you mean 2e-4 without quotes?" in told
    )
    assert "sampling.top_p = 1.5: allowed is a number above 0 and at most 1" in told
    assert str(path) in str(caught.value)
    assert "5 problems" in str(caught.value)


def test_rules_between_settings_stand_in_the_same_list_as_wrong_values() -> None:
    told = problems_of(
        {"staleness": {"max": 1, "period": 3}, "log": {"level": "loud"}, "net": {"host": "0.0.0.0"}}
    )
    assert [text.split(":")[0].split(" =")[0] for text in told] == [
        "log.level",
        "staleness.period",
        "net.host",
    ]


def test_a_rule_is_not_told_about_a_value_that_is_wrong_itself() -> None:
    (only,) = problems_of({"staleness": {"max": "2", "period": 9}})
    assert only.startswith("staleness.max")


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"staleness": {"max": 2, "period": 4}}, "staleness.period: 4 exceeds S + 1 = 3"),
        (
            {"staleness": {"late": "mask"}, "worker": {"on_update": "abort"}},
            'staleness.late: "mask" needs worker.on_update = "continue"',
        ),
        ({"dispatch": {"lead_steps": 2.5}}, "dispatch.lead_steps: 2.5 exceeds S = 2"),
        ({"heartbeat": {"interval_s": 5.0}}, "heartbeat: interval_s 5, suspect_s 5 and gone_s 15"),
        ({"heartbeat": {"gone_s": 5}}, "heartbeat: interval_s 1, suspect_s 5 and gone_s 5"),
        ({"http": {"host": "192.0.2.7"}}, 'http.host: "192.0.2.7" is not loopback'),
        ({"net": {"host": "192.0.2.7", "curve": False}}, "net.curve: false is allowed only while"),
        ({"net": {"host": "*"}}, 'net.host: "*" is no address that a peer can dial'),
        ({"net": {"coordinator": "tcp://a:1"}}, "missing: net.coordinator_rollouts, net.coordi"),
        ({"net": {"coordinator": "a:1"}}, 'net.coordinator is "a:1"; the form is "tcp://HOST'),
        (
            {
                "net": {
                    "coordinator": "tcp://a:1",
                    "coordinator_rollouts": "tcp://a:2",
                    "coordinator_key": "short",
                }
            },
            "net.coordinator_key has 5 characters",
        ),
        (
            {"net": {"control_port": 7000, "origin_port": 7000}},
            "net.control_port and net.origin_port are both 7000",
        ),
        (
            {"net": {"rollouts_port": 7000, "join_port": 7000}},
            "net.rollouts_port and net.join_port are both 7000",
        ),
        ({"eval": {"every_steps": 5, "num_tasks": 70_000}}, "eval.num_tasks: 70000 exceeds"),
        ({"eval": {"every_steps": 5, "num_tasks": 0}}, "eval.num_tasks = 0: allowed is an integer"),
        ({"learner": {"updates_per_step": 8, "groups_per_step": 4}}, "learner.updates_per_step: 8"),
        ({"model": {"compute": "bfloat16"}}, 'model.compute: "bfloat16" needs model.dtype'),
        (
            {"model": {"dtype": "bfloat16", "compute": "float32"}, "learner": {"ranks": 2}},
            "needs learner.ranks = 1, not 2",
        ),
        ({"learner": {"dtype": "bfloat16"}}, 'learner.dtype: "bfloat16" needs model.dtype'),
        (
            {
                "model": {"dtype": "bfloat16", "compute": "float32"},
                "learner": {"dtype": "bfloat16"},
            },
            'is less than model.compute = "float32"',
        ),
        ({"sampling": {"max_tokens": 2**21}}, "sampling.max_tokens: 2097152 exceeds the 1048576"),
        (
            {"sampling": {"max_tokens": 2**18}, "dispatch": {"group_size": 1024}},
            "may need a frame of 1073741824 bytes",
        ),
        (
            {"sampling": {"max_tokens": 4096}, "net": {"rollout_bytes_in_flight": 1000}},
            "make a group of up to 294912 bytes, above net.rollout_bytes_in_flight 1000",
        ),
        (
            {"environment": {"settings": {"when": [tomllib.loads("d=2020-01-01")["d"]]}}},
            "environment.settings.when[0] = 2020-01-01 (date) cannot travel",
        ),
        (
            {"audit": {"share": 0.1}},
            "audit.share: 0.1 of the groups would be audited by nobody; name trusted workers in",
        ),
        (
            {
                "audit": {"share": 0.1, "workers": ["w"]},
                "environment": {"name": "verifiers:gsm8k"},
            },
            "audit.share: groups of 'verifiers:gsm8k' cannot be audited",
        ),
        (
            {"environment": {"settings": {"rate": float("nan")}}},
            "environment.settings.rate = nan cannot travel",
        ),
    ],
)
def test_a_combination_that_cannot_work_is_refused_with_its_reason(
    tables: dict[str, Any], said: str
) -> None:
    (only,) = problems_of(tables)
    assert said in only


@pytest.mark.parametrize(
    "tables",
    [
        {"staleness": {"max": 2, "period": 3}},
        {"staleness": {"max": 0}, "dispatch": {"lead_steps": 0}},
        {"staleness": {"late": "mask"}},
        {"http": {"host": "192.0.2.7", "token": "secret"}},
        {"http": {"host": "192.0.2.7", "enabled": False}},
        {"net": {"host": "::1", "curve": False}},
        {"net": {"host": "localhost", "curve": False}},
        {"audit": {"share": 1.0, "workers": ["w-1"]}},
    ],
)
def test_what_is_just_allowed_is_allowed(tables: dict[str, Any]) -> None:
    assert config_problems(config_from_mapping(tables)) == []


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            {"stalenes": {"max": 2}},
            "stalenes = { max = 2 }: no such table; did you mean staleness?",
        ),
        ({"learner": {"group_size": 4}}, "did you mean dispatch.group_size or eval.group_size?"),
        ({"learner": 3}, "learner = 3: this is a table; write it as [learner] with keys steps"),
        ({"learner": {"threads": 2.0}}, "did you mean 2?"),
        ({"learner": {"steps": True}}, "learner.steps = true: allowed is an integer"),
        ({"net": {"curve": "yes"}}, 'net.curve = "yes": allowed is true or false'),
        ({"net": {"curve": "False"}}, "did you mean false without quotes?"),
        ({"run": {"name": "a b"}}, 'run.name = "a b": allowed is text like'),
        ({"model": {"path": 3}}, 'model.path = 3: allowed is text in quotes; did you mean "3"?'),
        ({"dispatch": {"lead_steps": "far"}}, "a number from 0 to 1000, or leave it out"),
        ({"learner": {"loss": {"clip": 0.1}}}, "learner.loss.clip = 0.1: no such setting; did you"),
        ({"environment": {"settings": 3}}, "environment.settings = 3: allowed is a table"),
        ({"budget": {"max_usd": float("inf")}}, "budget.max_usd = inf: allowed is a number"),
        (
            {"cost": {"budget_usd": 5}},
            "cost.budget_usd = 5: this setting is budget.max_usd now; write max_usd = 5 under "
            "[budget]",
        ),
    ],
)
def test_a_wrong_key_or_value_is_told_with_what_is_allowed(
    tables: dict[str, Any], said: str
) -> None:
    (only,) = problems_of(tables)
    assert said in only


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[learner]\nsteps = \n", "line 2, column 9: not TOML: invalid value"),
        ("[learner\n", "line 1, column 9: not TOML: expected ']'"),
        ('a = "x', "line 1, column 7: not TOML: unterminated string"),
        ("[run]\n[run]\n", "line 2, column 5: not TOML: cannot declare"),
    ],
)
def test_a_syntax_error_is_told_with_line_and_column(tmp_path: Path, text: str, said: str) -> None:
    path = a_file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert f"{path}, {said}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_told_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "quickstart.toml").touch()
    with pytest.raises(ConfigError, match=r"quikstart.toml does not exist; did you mean .*quick"):
        load_config(tmp_path / "quikstart.toml")
    with pytest.raises(ConfigError, match="nor does its folder"):
        load_config(tmp_path / "nowhere" / "run.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)


def test_a_file_that_is_not_utf_8_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b'[run]\nname = "\xff"\n')
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config(path)


def test_overrides_are_toml_values_and_bare_words_are_text(tmp_path: Path) -> None:
    path = a_file(tmp_path, "[learner]\nsteps = 5\n[environment.settings]\ndigits = 1\n")
    config = load_config(
        path,
        [
            "learner.steps=7",
            "learner.loss.clip_low = 0.1",
            "model.path=builtin:other",
            'run.name="quoted"',
            "net.curve=false",
            "environment.settings.digits=[1, 2]",
            "environment.settings.kind=sum",
            'environment.settings."a.b"=true',
        ],
    )
    assert config.learner.steps == 7
    assert config.learner.loss.clip_low == 0.1
    assert config.model.path == "builtin:other"
    assert config.run.name == "quoted"
    assert config.net.curve is False
    assert config.environment.settings == {"digits": [1, 2], "kind": "sum", "a.b": True}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learner.steps", "the form is --set TABLE.KEY=VALUE"),
        ("=3", "is no key"),
        ("a b=3", "is no key"),
        ("[run]\nname=3", "is no"),
        ("learner.steps.more=3", "learner.steps is a value and has no keys of its own"),
        ("log.level=[1,", "[1, is not a TOML value"),
        ("run.name=1\nsteps=2", "must be printable"),
        ("learner.step=3", "did you mean learner.steps?"),
    ],
)
def test_a_wrong_override_is_a_problem_like_any_other(
    tmp_path: Path, override: str, said: str
) -> None:
    path = a_file(tmp_path, '[learner]\nsteps = 5\n[log]\nformat = "xml"\n')
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert len(caught.value.problems) == 2
    assert any(said in problem for problem in caught.value.problems)
    assert any(problem.startswith("log.format") for problem in caught.value.problems)


AN_OFFER = {"name": "a", "price_usd_per_h": 0.3, "groups_per_s": 1.0}


@pytest.mark.parametrize(
    ("offers", "said"),
    [
        ([AN_OFFER, {**AN_OFFER, "names": 1}], "offers[1].names = 1: no such setting; did you"),
        ([{"groups_per_sec": 1.0, **AN_OFFER}], "did you mean offers[0].groups_per_s? ([[offers"),
        ([{**AN_OFFER, "count": 0}], "offers[0].count = 0: allowed is an integer from 1 to"),
        ([{"name": "a", "groups_per_s": 1.0}], "offers[0] lacks price_usd_per_h: give a number"),
        ([3], "offers[0] = 3: this is a table; write it as [[offers]] with keys name, price_"),
        (AN_OFFER, "these are tables; begin each with [[offers]], its keys are name, price_usd"),
        ([AN_OFFER, AN_OFFER], 'offers: 2 offers are called "a"; give each kind of machine its'),
        ([{**AN_OFFER, "tokens_per_s": 9}], 'offers: "a" has both of groups_per_s and tokens_'),
        ([{"name": "a", "price_usd_per_h": 1}], 'offers: "a" has neither of groups_per_s and'),
    ],
)
def test_a_wrong_offer_is_told_with_its_place(offers: Any, said: str) -> None:
    (only,) = problems_of({"offers": offers})
    assert said in only


def test_all_wrong_offers_are_told_at_once_beside_other_problems() -> None:
    told = problems_of(
        {
            "offers": [{**AN_OFFER, "count": -1}, {**AN_OFFER, "slots": "two"}],
            "plan": {"staleness_min": 9},
        }
    )
    assert [text.split(" =")[0].split(":")[0] for text in told] == [
        "offers[0].count",
        "offers[1].slots",
        "plan.staleness_min",
    ]


def test_an_override_names_an_offer_by_its_name(tmp_path: Path) -> None:
    text = toml_document({"offers": [AN_OFFER, {**AN_OFFER, "name": "b"}]})
    assert text.startswith('[[offers]]\nname = "a"\n')
    path = a_file(tmp_path, text)
    config = load_config(path, ["offers.b.count=7", "plan.train_s=4"])
    assert [offer.count for offer in config.offers] == [1, 7]
    assert config.plan.train_s == 4
    assert config_from_mapping(tomllib.loads(config_to_toml(config))) == config
    for override, said in (
        ("offers.c.count=7", 'no table of offers is called "c" (known: a, b)'),
        ("offers.count=7", "offers is an array of tables; say which by its name, as in"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(path, [override])
        assert said in str(caught.value)


def test_the_defaults_are_valid_and_written_out_they_are_the_same() -> None:
    assert config_problems(Config()) == []
    assert config_from_mapping(tomllib.loads(config_to_toml(Config()))) == Config()


def typed(value: Any) -> Any:
    """The value with the types of all that is in it."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return type(value), value


plain = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.dates()
    | st.datetimes(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('ab."é \n'), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text('abc." \t'), plain, max_size=4))
def test_any_table_that_is_written_is_read_back_the_same(table: dict[str, Any]) -> None:
    read = tomllib.loads(toml_document(table))
    assert read == table
    assert typed(read) == typed(table)  # True is not 1, 1.0 is not 1


def test_files_are_shipped() -> None:
    assert "quickstart.toml" in [path.name for path in CONFIGS]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_file_is_valid_names_its_schema_and_survives_being_resolved(
    path: Path,
) -> None:
    config = load_config(path)
    schema = "../echo2.schema.json" if path.parent.name == "examples" else "./echo2.schema.json"
    assert path.read_text(encoding="utf-8").startswith(f"#:schema {schema}\n")
    assert config_from_mapping(tomllib.loads(config_to_toml(config))) == config


def test_the_shipped_schema_is_that_of_the_settings() -> None:
    shipped = json.loads((ROOT / "configs" / "echo2.schema.json").read_text(encoding="utf-8"))
    assert shipped == config_schema(), (
        "write it anew: echo2 check --schema > configs/echo2.schema.json"
    )


def test_every_setting_is_described_or_speaks_for_itself() -> None:
    schema = config_schema()
    assert schema["properties"].keys() == Config.model_fields.keys()
    described = schema["$defs"]["StalenessTable"]["properties"]["max"]["description"]
    assert described.startswith("S: most learner steps")


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"run": {"name": ".."}}, "run.name"),
        ({"worker": {"name": "learner"}}, "name of another part"),
        ({"worker": {"name": ".w"}}, "begins with a dot"),
        ({"worker": {"name": "w" * 63}}, "at most 64"),
        ({"dispatch": {"stall_s": 0.5}}, "not above heartbeat.interval_s 1"),
    ],
)
def test_what_would_fail_only_in_the_run_is_told_before_it(
    tables: dict[str, Any], said: str
) -> None:
    (problem,) = problems_of(tables)
    assert said in problem


def test_a_run_folder_of_an_earlier_release_with_a_default_under_its_former_name_is_read() -> None:
    assert config_from_mapping({"cost": {"budget_usd": 0.0}}) == config_from_mapping({})
