"""The demo's picture, its news and its verdict, from scenes that were made up."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from example_project.demo import remains
from example_project.demo.epilogue import epilogue
from example_project.demo.news import news
from example_project.demo.pace import MAX_ATTEMPTS, Pace, TooSlow
from example_project.demo.scene import Act, Run, Scene, Story, Uptime, first_service, wakes
from example_project.demo.screen import LiveScreen, PlainScreen, Printer
from example_project.demo.text import Segment, join, line, plain, render
from example_project.demo.timeline import frame, table
from example_project.demo.verdict import Check, Dark, Plot, Sleep, judge

SENT, KILLED, RESTARTED, READY, END = 1005.0, 1007.0, 1009.0, 1012.0, 1016.0
DUE = 1014.1

UPTIMES = (
    Uptime("worker", 1000.0, 1003.0, KILLED),
    Uptime("beat", 1000.0, 1002.0, KILLED),
    Uptime("worker", RESTARTED, READY),
    Uptime("beat", RESTARTED, 1011.0),
)
STORY = Story(
    title="onboard Ada",
    task_id="a",
    state="SUCCESS",
    result="customer",
    dues=(DUE,),
    runs=(Run(11, 1005.0, 1005.2), Run(22, 1014.2, 1014.3)),
    acts=(Act(1005.1, "customer 1", "welcome"), Act(1014.25, "customer 1", "paid?")),
)
SCENE = Scene(
    began_at=1000.0,
    now=END,
    day_seconds=3.0,
    uptimes=UPTIMES,
    stories=(STORY,),
    digests=(Act(1014.0, "shop", "digest"),),
    exports=(Act(1014.0, "export x", "page 0"),),
    sent_at=SENT,
)
PLOT = Plot("onboard Ada", "customer", ("welcome", "paid?"), (Sleep(seconds=9.0),))
DARK = Dark(KILLED, RESTARTED, ("SLEEPING",), killed=4, rows=1, messages=0)


def failures(scene: Scene = SCENE, plot: Plot = PLOT, dark: Dark = DARK) -> list[str]:
    return [check.text for check in judge(scene, (plot,), dark) if not check.passed]


def with_story(**changes: object) -> Scene:
    return replace(SCENE, stories=(replace(STORY, **changes),))  # type: ignore[arg-type]


# The verdict.


def test_a_good_play_passes_every_check() -> None:
    checks = judge(SCENE, (PLOT,), DARK)
    assert failures() == []
    assert Check(True, "onboard Ada: woke 100 ms after it was due (limit 5 s)") in checks


def test_a_step_that_ran_twice_is_told() -> None:
    twice = with_story(acts=(*STORY.acts, Act(1014.2, "customer 1", "welcome")))
    assert failures(twice) == ["onboard Ada: what its steps did: 2 × welcome, 1 × paid?"]


def test_a_step_that_did_not_run_is_told() -> None:
    assert failures(with_story(acts=STORY.acts[:1])) == ["onboard Ada: what its steps did: 1 × welcome"]


@pytest.mark.parametrize(
    ("woke_at", "told"),
    [
        (DUE - 0.001, "woke 1 ms too early (limit 5 s)"),
        (DUE + 5.1, "woke 5100 ms after it was due (limit 5 s)"),
    ],
    ids=["early", "late"],
)
def test_a_wake_at_the_wrong_time_is_told(woke_at: float, told: str) -> None:
    (failure,) = failures(with_story(runs=(STORY.runs[0], Run(22, woke_at, woke_at))))
    assert failure == f"onboard Ada: {told}"


def test_a_task_that_never_woke_is_told() -> None:
    (slept, ended) = failures(with_story(runs=STORY.runs[:1], state="SLEEPING", result=None))
    assert slept == "onboard Ada: never woke"
    assert "expected: 'customer' after 2 runs" in ended


def test_a_sleep_that_did_not_happen_is_told() -> None:
    (failure,) = failures(with_story(dues=()))
    assert failure.endswith("never woke; sleeps: 0 of 1")


def test_a_sleep_of_another_length_is_told() -> None:
    too_short, too_long = (replace(PLOT, sleeps=(Sleep(seconds=s),)) for s in (9.5, 6.0))
    assert failures(plot=too_short)[0].endswith("due at another time than the code asked for: -400 ms")
    assert failures(plot=too_long)[0].endswith("due at another time than the code asked for: +2900 ms")


def test_a_sleep_that_is_somewhat_longer_is_told_but_passes() -> None:
    checks = judge(SCENE, (replace(PLOT, sleeps=(Sleep(seconds=8.0),)),), DARK)
    assert all(check.passed for check in checks)
    assert any(
        check.text.endswith("due up to 900 ms later than the code says (limit 2 s)") for check in checks
    )


def test_a_sleep_until_another_instant_is_told() -> None:
    assert failures(plot=replace(PLOT, sleeps=(Sleep(until=DUE),))) == []
    (failure,) = failures(plot=replace(PLOT, sleeps=(Sleep(until=DUE + 1),)))
    assert failure.endswith("due at another time than the code asked for: -1000 ms")


def test_a_wrong_result_is_told() -> None:
    (failure,) = failures(with_story(result="lapsed"))
    assert failure.startswith("onboard Ada: SUCCESS, 'lapsed'")
    assert failure.endswith("expected: 'customer' after 2 runs")


def test_a_run_too_many_is_told() -> None:
    (failure,) = failures(with_story(runs=(*STORY.runs, Run(22, 1015.0, 1015.1))))
    assert "after 3 runs of the body" in failure


def test_a_process_that_outlived_the_kill_is_told() -> None:
    same = (STORY.runs[0], replace(STORY.runs[1], pid=11))
    (failure,) = failures(with_story(runs=same))
    assert "(processes 11, 11)" in failure


def test_a_task_that_did_not_sleep_in_the_dark_is_told() -> None:
    dark = replace(DARK, states=("SLEEPING", "PENDING"), rows=2)
    assert failures(dark=dark) == [
        "states of the results while every process was dead: 1 SLEEPING, 1 PENDING"
    ]


def test_work_in_the_dark_is_told() -> None:
    scene = replace(SCENE, exports=(*SCENE.exports, Act(1008.0, "export y", "page 0")))
    assert failures(scene) == ["1 runs and steps in the 2.0 s without a process"]


@pytest.mark.parametrize(("rows", "messages"), [(0, 0), (1, 1)], ids=["the row is gone", "a message waits"])
def test_a_task_that_was_not_a_row_alone_is_told(rows: int, messages: int) -> None:
    assert failures(dark=replace(DARK, rows=rows, messages=messages)) == [
        f"kept meanwhile: {rows} sleeping rows, {messages} messages of these tasks in the broker"
    ]


def test_a_beat_that_stays_silent_after_the_restart_is_told() -> None:
    scene = replace(SCENE, digests=(Act(1006.0, "shop", "digest"),))
    assert failures(scene) == ["beat schedule: 0 digest(s) and 1 export(s) after the restart"]


def test_a_page_written_twice_is_told() -> None:
    scene = replace(SCENE, exports=SCENE.exports * 2)
    assert failures(scene) == ["beat schedule: 1 exported page(s), 1 written twice"]


# Lateness.


def test_lateness_counts_from_the_due_time_while_all_is_up() -> None:
    (wake,) = wakes(STORY, UPTIMES)
    assert wake.late_seconds == pytest.approx(0.1)
    assert not wake.is_early


def test_lateness_counts_from_the_restart_where_that_came_later() -> None:
    overslept = replace(STORY, dues=(1008.0,), runs=(STORY.runs[0], Run(22, READY + 0.3)))
    (wake,) = wakes(overslept, UPTIMES)
    assert wake.late_seconds == pytest.approx(0.3)
    assert wake.text == "300 ms after the restart"
    assert wake.short_text == "300 ms*"


def test_a_wake_shows_that_the_restart_was_over() -> None:
    (wake,) = wakes(replace(STORY, dues=(1008.0,), runs=(STORY.runs[0], Run(22, 1011.9))), UPTIMES)
    assert wake.late_seconds == 0
    assert not wake.is_early


def test_before_the_restart_is_seen_to_be_over_nothing_is_late() -> None:
    starting = (*UPTIMES[:2], Uptime("worker", RESTARTED), Uptime("beat", RESTARTED, 1011.0))
    (wake,) = wakes(replace(STORY, dues=(1008.0,), runs=(STORY.runs[0], Run(22, READY))), starting)
    assert wake.text == "0 ms after the restart"


def test_service_needs_each_kind_of_process() -> None:
    assert first_service(1002.5, UPTIMES) == 1003.0
    assert first_service(1011.5, UPTIMES) == READY
    assert first_service(1005.0, UPTIMES) == 1005.0


# The picture.


def lane(scene: Scene, label: str) -> str:
    return next(plain(row) for row in frame(scene, 67) if plain(row).strip().startswith(label))


def test_a_process_lane_shows_boot_life_kill_and_gap() -> None:
    shown = lane(SCENE, "worker").split("worker", 1)[1].strip()
    boot, life, gap, second = (shown.count(glyph) for glyph in "╌━ ✗")
    assert boot > 0
    assert life > 0
    assert gap > 0
    assert second == 1
    assert "━✗ " in shown


def test_a_sleeping_task_shows_when_it_will_wake() -> None:
    asleep = replace(with_story(state="SLEEPING", runs=STORY.runs[:1]), now=1008.0)
    shown = lane(asleep, "onboard Ada")
    assert shown.index("●") < shown.index("┄") < shown.index("◇")
    assert "wakes in 6.1 s" in "\n".join(map(plain, table(asleep)))


@pytest.mark.parametrize(("state", "glyph"), [("SUCCESS", "✓"), ("FAILURE", "✗")])
def test_a_task_lane_ends_with_its_outcome(state: str, glyph: str) -> None:
    assert lane(with_story(state=state), "onboard Ada").rstrip().endswith(glyph)


def test_the_axis_counts_days_from_the_sending() -> None:
    day_zero, day_one = (lane(SCENE, "day").index(day) for day in "01")
    assert day_zero < day_one
    assert lane(SCENE, "onboard Ada").index("●") == day_zero


def test_a_picture_before_anything_was_sent_can_be_drawn() -> None:
    rows = frame(Scene(began_at=1000.0, now=1000.0, day_seconds=3.0), 80)
    assert plain(rows[0]).strip() == "day"


def test_the_table_counts_what_was_seen() -> None:
    row = plain(table(SCENE)[1])
    assert row.split() == [
        *("onboard", "Ada", "SUCCESS", "2", "×", "100", "ms"),
        *("1", "×", "welcome,", "1", "×", "paid?"),
    ]


def test_the_legend_explains_every_symbol_of_the_lanes() -> None:
    asleep = replace(with_story(state="SLEEPING", runs=STORY.runs[:1]), now=1008.0)
    rows = [plain(row) for scene in (asleep, SCENE) for row in frame(scene, 67)]
    legend = next(row for row in rows if "asleep: a row" in row)
    lanes = [row[16:] for row in rows if row.startswith(("  worker", "  onboard Ada   ", "  daily digest"))]
    drawn = {glyph for row in lanes for glyph in row if glyph in "╌━✗●┄◇✓·"}
    assert drawn == set("╌━✗●┄◇✓·")
    assert drawn <= set(legend)


# The pace.


def test_a_usual_machine_keeps_the_usual_days() -> None:
    pace = Pace(3.0)
    pace.check_boot(6.0)
    pace.check_day(3.9, 4.0, "the restart")
    assert pace.max_seconds < 60


def test_a_slow_start_makes_the_days_longer_and_the_limit_with_them() -> None:
    with pytest.raises(TooSlow, match=r"this machine is slow: a day takes 8 s") as slow:
        Pace(3.0).check_boot(12.0)
    longer = Pace(slow.value.day_seconds, attempt=2)
    longer.check_boot(12.0)
    assert longer.max_seconds > 57 + 7 * 5


def test_a_restart_that_comes_too_late_makes_the_days_longer() -> None:
    with pytest.raises(TooSlow, match="the restart was over on day 8") as slow:
        Pace(3.0).check_day(8.0, 4.0, "the restart")
    assert slow.value.day_seconds == 16.0


@pytest.mark.parametrize("pace", [Pace(1.0, is_exact=True), Pace(3.0, attempt=MAX_ATTEMPTS)])
def test_exact_days_and_the_last_attempt_go_on_whatever_it_takes(pace: Pace) -> None:
    pace.check_boot(100.0)
    pace.check_day(9.0, 4.0, "the restart")


# What is left.


def test_a_message_in_the_broker_is_counted_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(remains.app.conf.broker_transport_options, "folder", str(tmp_path))
    for place, task_id in (("queues/celery", "a1"), ("taken/1-ff", "b2"), ("queues/celery", "c3")):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / f"{task_id}.msg").write_text(f'{{"headers": {{"id": "{task_id}"}}}}')
    assert remains.messages({"a1", "b2"}) == 2


def test_the_epilogue_says_what_was_counted() -> None:
    text = " ".join(epilogue(replace(DARK, states=("SLEEPING",) * 3, rows=3)))
    assert "4 processes, while 3 tasks slept; for 2.0 s" in text
    assert "3 rows in a database, no messages" in text


# Text.


def test_a_line_is_cut_to_the_width_by_what_is_seen_of_it() -> None:
    text = line(Segment("abc", "bad"), "def")
    assert render(text, 4, colour=True, unicode=True) == "\x1b[1;31mabc\x1b[0md"
    assert render(text, 2, colour=False, unicode=True) == "ab"


def test_without_unicode_every_glyph_of_the_picture_is_ascii() -> None:
    rows = [render(row, 100, colour=False, unicode=False) for row in frame(SCENE, 80)]
    assert all(row.isascii() for row in rows)


def test_neighbours_of_one_style_are_joined() -> None:
    cells = [Segment("a", "up"), Segment("b", "up"), Segment("c")]
    assert join(cells) == (Segment("ab", "up"), Segment("c"))


# News.


def test_news_tell_what_is_new_and_nothing_twice() -> None:
    asleep = with_story(state="SLEEPING", runs=STORY.runs[:1], acts=STORY.acts[:1])
    assert news(replace(SCENE, stories=()), asleep) == [
        "onboard Ada: step done: welcome",
        "onboard Ada: SLEEPING until day 3.0",
    ]
    assert news(asleep, SCENE) == [
        "onboard Ada: woke 100 ms after it was due; run 2 of the body, in process 22",
        "onboard Ada: step done: paid?",
        "onboard Ada: SUCCESS, 'customer'",
    ]
    assert news(SCENE, SCENE) == []


# Screens.


def test_a_plain_screen_writes_no_control_characters() -> None:
    out = io.StringIO()
    screen = PlainScreen(Printer(out))
    screen.say("hello", "bad")
    screen.draw(SCENE)
    screen.finish(SCENE)
    assert "hello" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_a_live_screen_draws_over_its_last_picture_and_gives_the_cursor_back() -> None:
    out = io.StringIO()
    screen = LiveScreen(Printer(out))
    screen.draw(SCENE)
    height = out.getvalue().count("\n")
    screen.finish(SCENE)
    assert f"\x1b[{height}F" in out.getvalue()
    assert out.getvalue().endswith("\x1b[?25h")
