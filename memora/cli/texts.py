"""Every word the command line says to a person, in English and in Traditional Chinese.

Owns the wording and the choice of the language. Errors are not here: they carry their own English sentence, which
scripts and searches rely on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from memora.loadtest.words import Words


@dataclass(frozen=True, slots=True)
class Texts:
    """The catalogue; words in braces are filled in."""

    # --- help
    about: str
    version_help: str
    chat_help: str
    conversation_option: str
    message_option: str
    json_option: str
    offline_option: str
    worker_help: str
    serve_help: str
    host_option: str
    port_option: str
    up_help: str
    inspect_help: str
    conversation_argument: str
    delete_help: str
    yes_option: str
    export_help: str
    doctor_help: str
    audit_help: str
    repair_option: str

    # --- chat
    new_conversation: str
    known_conversation: str
    come_back: str
    offline_model: str
    offline_chosen: str
    no_worker: str
    evicts: str
    how_to_leave: str
    leave_hint: str
    words_help: str
    unknown_word: str
    did_you_mean: str
    interrupted: str
    not_stored: str
    cut_off: str
    gap: str
    folded: str
    fold_failed: str
    catching_up: str
    not_caught_up: str
    leaving: str

    # --- the stats block
    stored_messages: str
    summarized_messages: str
    newly_summarized_messages: str
    pending_messages: str
    context_messages: str
    counted_input_tokens: str
    actual_input_tokens: str
    output_tokens: str
    summary_update_tokens: str
    session_total_tokens: str
    not_said: str

    # --- history, context, summary
    no_history: str
    history_title: str
    folded_state: str
    pending_state: str
    window_state: str
    user: str
    assistant: str
    no_context: str
    context_title: str
    instructions: str
    context_tokens: str
    no_summary: str
    summary_title: str

    # --- worker
    worker_started: str
    worker_stopping: str
    private_redis: str

    # --- serve, up
    server_started: str
    server_stopping: str
    up_ready: str
    up_stopping: str
    up_ended: str
    up_again: str

    # --- inspect
    no_conversations: str
    id_column: str
    messages_column: str
    summarized_column: str
    pending_column: str
    version_column: str
    tokens_column: str
    active_column: str
    damaged: str
    conversation: str
    messages: str
    summarized: str
    pending: str
    window: str
    summary: str
    usage: str
    usage_figures: str
    generation: str
    created: str
    updated: str
    fold_due: str
    fold_failures: str
    next_context: str
    next_context_figures: str
    next_gap: str

    # --- delete
    really_delete: str
    deleted: str
    not_deleted: str

    # --- rebuild, rollback
    rebuild_help: str
    rollback_help: str
    version_option: str
    rebuilding: str
    rebuilt: str
    rebuild_goes_on: str
    rolled_back: str

    # --- loadtest
    loadtest_help: str
    loadtest_starting: str
    loadtest_judging: str
    loadtest_progress: str
    rate_option: str
    conversations_option: str
    think_option: str
    duration_option: str
    message_words_option: str
    seed_option: str
    url_option: str
    remote_option: str
    html_option: str
    loadtest_offline_option: str
    servers_option: str
    workers_option: str
    model_first_option: str
    model_reply_option: str
    summary_seconds_option: str
    model_jitter_option: str
    kill_worker_option: str
    restart_redis_option: str
    provider_errors_option: str
    loadtest: Words

    # --- audit
    audit_keys: str
    audit_index: str
    audit_history: str
    audit_tokens: str
    audit_folds: str
    audit_summary: str
    audit_counters: str
    audit_usage: str
    audit_turns: str
    audit_outbox: str
    audit_jobs: str
    audit_lifetimes: str
    audit_engine: str
    audit_broken: str
    audit_unchecked: str
    audit_found: str
    audit_mended: str
    audit_expected: str
    audit_instead: str
    audit_key: str
    audit_more: str
    audit_unread: str
    audit_figures: str
    audit_clean: str
    audit_all_mended: str
    audit_repairable: str
    audit_not_repairable: str
    audit_only_engine: str
    audit_progress: str

    # --- doctor
    settings_fine: str
    settings_unknown: str
    redis_fine: str
    redis_private: str
    persistence_on: str
    persistence_off: str
    keeps: str
    evicting: str
    rights_fine: str
    rights_missing: str
    workers_alive: str
    worker_comes_with_chat: str
    worker_missing: str
    clock_fine: str
    clock_off: str
    model_fine: str
    model_offline: str
    model_offline_chosen: str
    settings_check: str
    redis_check: str
    persistence_check: str
    eviction_check: str
    rights_check: str
    worker_check: str
    clock_check: str
    model_check: str


ENGLISH: Final = Texts(
    about="Memora: a chat whose conversations never outgrow the model.",
    version_help="Show the version.",
    chat_help="Talk. Works with nothing set up: brings its own Redis, worker and offline model.",
    conversation_option="Continue this conversation, or begin it under this id.",
    message_option="Say this one thing and leave; - reads it from standard input.",
    json_option="One JSON object a line, for programs.",
    offline_option="Use the offline model even if there is a key.",
    worker_help="Keep the summaries up to date, until stopped.",
    serve_help="Serve the HTTP API, which OpenAI's clients understand.",
    host_option="Address to listen on.",
    port_option="Port to listen on; 0 takes a free one.",
    up_help="Run everything: Redis if none is configured, a worker, and the server.",
    inspect_help="Show all conversations, or all about one.",
    conversation_argument="Id of the conversation.",
    delete_help="Forget one conversation.",
    yes_option="Do not ask.",
    export_help="Write one conversation to standard output as JSON.",
    rate_option="Turns a second, of all conversations together: conversations / think time.",
    conversations_option="Conversations that go on at once.  [default: 50]",
    think_option="Mean time between two turns of a conversation, log-normal; the next is due after it even if the "
    "answer is not there, and then held back until it is.  [default: 10]",
    duration_option="Seconds during which turns begin.",
    message_words_option="Median words of a message, log-normal, in English and Chinese.",
    seed_option="The same seed makes the same plan and the same model.",
    url_option="A server that runs; without it a private one is started.",
    remote_option="The server may be another machine.",
    html_option="Write a report with plots.",
    loadtest_offline_option="Use the offline model; a private server always does.",
    servers_option="Server processes; each turn of a conversation goes to the next.",
    workers_option="Workers of the private server.",
    model_first_option="Mean seconds to the model's first token.",
    model_reply_option="Mean seconds of a whole answer.",
    summary_seconds_option="Mean seconds of a summary.",
    model_jitter_option="How far these three are spread: 0.3 is ± 30 %.",
    kill_worker_option="Kill a worker every so many seconds; 0 is never.",
    restart_redis_option="Restart Redis every so many seconds; 0 is never.",
    provider_errors_option="Share of the requests to the model that fail at first.",
    loadtest=Words(
        language="en",
        title="Memora load test",
        setting="{rate} turns/s in {conversations} conversations, {think} s think time, {words} words a message, for "
        "{duration} s",
        private_server="{servers} × server, {workers} × worker, offline model: first token {first} s, "
        "reply {reply} s, summary {summary} s, ± {jitter}",
        result="{turns} turns in {seconds} s ({rate} a second), {errors} errors, {retries} retries",
        at_once="at once, at most: {active} conversations active, {in_flight} turns in flight",
        held_back="{turns} turns were due before the one before them was answered, and waited for it",
        accidents_line="accidents: {what}",
        accidents={
            "workers killed": "workers killed",
            "Redis restarts": "Redis restarts",
            "provider errors": "provider errors",
        },
        tokens_line="tokens: {what}",
        tokens={
            "answer_input": "answer input",
            "answer_output": "answer output",
            "fold_input": "fold input",
            "fold_output": "fold output",
        },
        first_piece="time to first token",
        whole_turn="whole turn",
        memory_overhead="memory overhead",
        fold_lag_messages="fold lag, messages",
        fold_lag_seconds="fold lag, seconds",
        lateness="load test late by",
        latency_note="Latencies count from the moment at which a turn was due, whatever it waited for.",
        lateness_note="The last line is the load test's own lateness, which is part of them.",
        not_answered="{turns} turns were not answered: {kinds}",
        folds_stuck="folds have come to a stop: {messages} messages wait for one",
        folds_unknown="not known whether all is folded: the server's /metrics does not tell",
        audit_clean="audit clean: {conversations} conversations, {messages} messages, {folds} folds",
        audit_found="audit: {findings} findings in {conversations} conversations, {messages} messages, {folds} folds",
        not_audited="not audited: {why}",
        ledger_equal="ledger equal: the histories hold every answered turn, and no other",
        ledger_differs="ledger: {conversations} histories differ from what their clients know",
        judge_clean="judge clean: every earlier turn visible exactly once, in order, in {requests} requests to the "
        "model, {gaps} messages in reported gaps",
        judge_found="judge: {violations} violations in {requests} requests to the model",
        not_judged="not judged: {why}",
        was_stopped="the run was stopped",
        turns_answered="turns answered",
        errors="errors",
        turns_a_second="turns a second",
        in_flight="turns in flight",
        active="conversations active",
        most_in_flight="turns in flight, at most",
        most_active="conversations active, at most",
        held_back_tile="turns held back",
        first_piece_median="first token, median",
        memory_median="memory, median",
        retries="retries",
        in_gaps="messages in gaps",
        tokens_tile="tokens, {kind}",
        percentiles="Percentiles",
        latency_by_percentile="Latency by percentile",
        first_piece_over_time="Time to first token over time",
        at_once_over_time="At once",
        turns_over_time="Turns and errors, each second",
        turns="turns",
        messages="messages",
        seconds="seconds",
        nothing_to_show="nothing to show",
    ),
    loadtest_help="Put a server under load, by default one of its own, and judge what became of every turn.",
    loadtest_starting="starting a private Redis, model, server and workers",
    loadtest_judging="waiting for the last folds, then auditing",
    loadtest_progress="{elapsed}/{duration} s · {turns} turns, {running} running, {errors} errors · "
    "first token {median} ms, p99 {p99} ms",
    audit_help="Check everything that is stored, or one conversation; --repair mends what can be derived.",
    repair_option="Mend what can be derived; never touches a message.",
    doctor_help="Check settings, Redis, worker and model, and say what to do.",
    new_conversation="conversation {id}",
    known_conversation="conversation {id}: {messages} messages, {summarized} of them summarized",
    come_back="come back with: memora chat -c {id}",
    offline_model="the offline model answers, by fixed rules: set OPENAI_API_KEY for a real one",
    offline_chosen="the offline model answers, by fixed rules, as you asked",
    no_worker="no worker is alive, so nothing is summarized: start one with `memora worker`",
    evicts="this Redis evicts keys when it is full, and conversations with them: set maxmemory-policy to noeviction",
    how_to_leave="/help for help · Ctrl-D to leave",
    leave_hint="Ctrl-D leaves the chat",
    words_help="""\
history, context, summary, exit alone on a line, or with a slash:
  /history   every message of this conversation
  /context   exactly what was sent for the last answer
  /summary   what stands for the older messages
  /exit      leave (Ctrl-D too)
  /help      this
To say one of these words to the model, put a space or a backslash in front: \\history
Alt-Enter, or Esc and then Enter, begins a new line. Ctrl-C stops an answer.""",
    unknown_word="no command {word}, so nothing was sent: /help lists them; a space in front sends it",
    did_you_mean="no command {word}, so nothing was sent. Did you mean {guess}? A space in front sends it",
    interrupted="stopped; nothing was stored. Your message is still there to send again",
    not_stored="nothing was stored. Your message is still there to send again",
    cut_off="the answer was cut off ({reason})",
    gap="{count} older messages did not fit and were left out",
    folded="folded messages {first}–{last} into the summary (version {version}, {tokens} tokens)",
    fold_failed="the summary could not be updated ({reason}); it will be tried again",
    catching_up="updating the summary before leaving ({pending} messages pending; Ctrl-C skips)",
    not_caught_up="{pending} messages are still pending; they are folded next time",
    leaving="come back with: memora chat -c {id}",
    stored_messages="stored history messages",
    summarized_messages="summarized history messages",
    newly_summarized_messages="newly summarized messages",
    pending_messages="pending messages",
    context_messages="context messages sent",
    counted_input_tokens="counted input tokens",
    actual_input_tokens="actual input tokens",
    output_tokens="output tokens",
    summary_update_tokens="summary update tokens",
    session_total_tokens="session total tokens",
    not_said="not reported",
    no_history="no messages yet",
    history_title="history of {id}: {messages} messages",
    folded_state="summarized",
    pending_state="pending",
    window_state="in the window",
    user="user",
    assistant="assistant",
    no_context="nothing has been sent yet",
    context_title="sent for the last answer: {messages} messages, {tokens} of at most {budget} tokens",
    instructions="instructions",
    context_tokens="tokens: instructions {instructions} · summary {summary} · recent messages {tail} · "
    "current message {message} · start of the reply {reply} · total {total}",
    no_summary="no summary yet: {messages} messages, {pending} pending",
    summary_title="summary, version {version}: {summarized} of {messages} messages, {pending} pending, {tokens} tokens",
    worker_started="folding for {redis} with {model}; Ctrl-C or SIGTERM stops",
    worker_stopping="stopping: running folds may finish; once more stops at once",
    private_redis="the private Redis in {place}",
    server_started="Memora answers at {url}",
    server_stopping="stopping: running answers may finish; once more stops at once",
    up_ready="everything runs: {url} · Ctrl-C stops",
    up_stopping="stopping: first the server, then the worker, then Redis; once more stops at once",
    up_ended="ended by itself with code {code}",
    up_again="starts again in {seconds} s",
    no_conversations="no conversations yet: `memora chat` begins one",
    id_column="conversation",
    messages_column="messages",
    summarized_column="summarized",
    pending_column="pending",
    version_column="version",
    tokens_column="tokens",
    active_column="last activity",
    damaged="damaged",
    conversation="conversation",
    messages="messages",
    summarized="summarized",
    pending="pending",
    window="in the window",
    summary="summary",
    usage="tokens",
    usage_figures="answers {answer_in} in, {answer_out} out · folds {fold_in} in, {fold_out} out · total {total}",
    generation="generation",
    created="created",
    updated="last change",
    fold_due="fold due",
    fold_failures="failed folds",
    next_context="next context",
    next_context_figures="instructions {instructions} · summary {summary} · recent messages {tail} · total {total} of "
    "{budget} tokens · room for a message of {room}",
    next_gap="{count} messages will not fit",
    really_delete="Delete conversation {id} with its {messages} messages for good? [y/N] ",
    deleted="conversation {id} is gone",
    not_deleted="nothing was deleted",
    rebuild_help="Make the summary of one conversation anew from its history.",
    rollback_help="Take the summary of one conversation back to an earlier version; what came after is folded again.",
    version_option="Version of the summary to go back to; 0 for none.",
    rebuilding="folding {folded} of {total} messages",
    rebuilt="conversation {id}: the summary is made anew, version {version} over {folded} messages",
    rebuild_goes_on="conversation {id}: {pending} messages are still pending; the worker folds them",
    rolled_back="conversation {id}: the summary is at version {version} again; {pending} messages wait to be folded",
    audit_keys="every key is of a conversation, and of its type",
    audit_index="every conversation is listed, and nothing else",
    audit_history="whole turns, every message readable",
    audit_tokens="token counts equal a recount",
    audit_folds="folds follow each other without hole or overlap",
    audit_summary="the summary is what the last fold made, within its cap",
    audit_counters="counters equal what they count",
    audit_usage="tokens of folds are in the usage",
    audit_turns="remembered turns and the last context are in the history",
    audit_outbox="everything pending waits for a fold, and nothing else",
    audit_jobs="every fold job is of a conversation",
    audit_lifetimes="all keys of a conversation expire together",
    audit_engine="Redis evicts nothing and writes everything to its file",
    audit_broken="not so: {what} ({findings} found)",
    audit_unchecked="could not be checked: {what} ({reason})",
    audit_found="found",
    audit_mended="mended",
    audit_expected="expected",
    audit_instead="found",
    audit_key="key",
    audit_more="and {count} more; the first thousand are in the output of --json",
    audit_unread="could not be read, because they began anew all the time: {ids}",
    audit_figures="{conversations} conversations, {messages} messages, {folds} folds",
    audit_clean="everything holds",
    audit_all_mended="{mended} mended, everything holds",
    audit_repairable="{findings} findings, {mendable} of them can be mended: `memora audit --repair`",
    audit_not_repairable="{mended} mended, {findings} findings left that cannot be derived from anything: restore a "
    "backup, or save what is readable with redis-cli and use `memora delete ID`",
    audit_only_engine="{findings} findings about Redis itself: `memora doctor` says what to set",
    audit_progress="{conversations} conversations, {messages} messages checked",
    settings_fine="readable",
    settings_unknown="{name} means nothing to Memora: did you mean {guess}?",
    redis_fine="{server} answers at {place}",
    redis_private="{server}, a private one of your own; its data is in {place}",
    persistence_on="on: conversations survive a restart",
    persistence_off="off: a restart loses every conversation. Run Redis with --appendonly yes",
    keeps="noeviction: a full Redis refuses instead of forgetting",
    evicting="a full Redis forgets conversations. Run it with --maxmemory-policy noeviction",
    rights_fine="scripts and the keys memora:* and arq:* are allowed",
    rights_missing="the Redis user may not {what}: ACL SETUSER has to allow it ~memora:* ~arq:* &memora:* +@all",
    workers_alive="{count} alive",
    worker_comes_with_chat="none runs; `memora chat` brings its own",
    worker_missing="none is alive, so nothing is summarized: start one with `memora worker`",
    clock_fine="the clocks agree within {seconds} s",
    clock_off="the clock of Redis is {seconds} s away from the one here: set both by NTP",
    model_fine="{model} answers",
    model_offline="no key, so the offline model: fixed rules, no language model. Set OPENAI_API_KEY for a real one",
    model_offline_chosen="the offline model, as you asked: fixed rules, no language model",
    settings_check="settings",
    redis_check="Redis",
    persistence_check="persistence",
    eviction_check="eviction",
    rights_check="rights",
    worker_check="worker",
    clock_check="clock",
    model_check="model",
)

CHINESE: Final = Texts(
    about="Memora：對話再長，也不會超出模型負荷的聊天服務。",
    version_help="顯示版本。",
    chat_help="開始聊天。不需任何設定：自備 Redis、背景程式與離線模型。",
    conversation_option="接續這個對話，或以此 ID 開始新對話。",
    message_option="只說這一句就離開；- 表示從標準輸入讀取。",
    json_option="每行一個 JSON 物件，供程式使用。",
    offline_option="即使有金鑰也使用離線模型。",
    worker_help="持續更新摘要，直到被停止。",
    serve_help="提供 HTTP API，OpenAI 的用戶端可直接使用。",
    host_option="監聽的位址。",
    port_option="監聽的連接埠；0 表示任選一個。",
    up_help="一次執行全部：Redis（若未設定）、背景程式與伺服器。",
    inspect_help="查看所有對話，或單一對話的一切。",
    conversation_argument="對話的 ID。",
    delete_help="刪除一個對話。",
    yes_option="不再詢問。",
    export_help="將一個對話以 JSON 寫到標準輸出。",
    rate_option="所有對話合計每秒的輪數：對話數 / 思考時間。",
    conversations_option="同時進行的對話數。[預設：50]",
    think_option="同一對話兩輪之間的平均時間（秒，對數常態分布）；到時下一輪即到期，若上一輪尚未回覆則等它回覆。[預設：10]",
    duration_option="開始新一輪的期間（秒）。",
    message_words_option="訊息字數的中位數（對數常態分布），中英混合。",
    seed_option="相同的種子產生相同的計畫與相同的模型。",
    url_option="已在執行的伺服器；未指定則啟動專用的伺服器。",
    remote_option="伺服器可以是另一台機器。",
    html_option="寫出含圖表的報告。",
    loadtest_offline_option="使用離線模型；專用的伺服器一律如此。",
    servers_option="伺服器程序數；對話的每一輪輪流送往下一個。",
    workers_option="專用伺服器的 worker 數。",
    model_first_option="模型第一個 token 的平均秒數。",
    model_reply_option="完整回覆的平均秒數。",
    summary_seconds_option="摘要的平均秒數。",
    model_jitter_option="這三個時間的浮動幅度：0.3 即 ± 30 %。",
    kill_worker_option="每隔幾秒強制結束一個 worker；0 為不做。",
    restart_redis_option="每隔幾秒重新啟動 Redis；0 為不做。",
    provider_errors_option="第一次會失敗的模型請求比例。",
    loadtest=Words(
        language="zh-Hant",
        title="Memora 負載測試",
        setting="每秒 {rate} 輪，{conversations} 個對話，思考時間 {think} 秒，訊息 {words} 字，為時 {duration} 秒",
        private_server="{servers} 個伺服器、{workers} 個 worker 程序，離線模型：第一個 token {first} 秒、"
        "回覆 {reply} 秒、摘要 {summary} 秒，± {jitter}",
        result="{seconds} 秒內 {turns} 輪（每秒 {rate} 輪），錯誤 {errors}，重試 {retries}",
        at_once="同時最多：進行中的對話 {active}，進行中的輪 {in_flight}",
        held_back="{turns} 輪到期時上一輪尚未回覆，等它回覆後才送出",
        accidents_line="意外：{what}",
        accidents={"workers killed": "結束的 worker", "Redis restarts": "Redis 重啟", "provider errors": "模型錯誤"},
        tokens_line="token：{what}",
        tokens={
            "answer_input": "回答輸入",
            "answer_output": "回答輸出",
            "fold_input": "摘要輸入",
            "fold_output": "摘要輸出",
        },
        first_piece="第一個 token 的時間",
        whole_turn="整輪",
        memory_overhead="記憶的額外時間",
        fold_lag_messages="待摘要的訊息",
        fold_lag_seconds="摘要落後的秒數",
        lateness="負載測試自身的延遲",
        latency_note="延遲一律從該輪到期的時刻算起，不論它等了什麼。",
        lateness_note="最後一列是負載測試自身的延遲，已包含在內。",
        not_answered="{turns} 輪沒有得到回覆：{kinds}",
        folds_stuck="摘要停滯：仍有 {messages} 則訊息等待摘要",
        folds_unknown="不知道是否全部摘要完成：伺服器的 /metrics 沒有說明",
        audit_clean="稽核無誤：{conversations} 個對話，{messages} 則訊息，{folds} 次摘要",
        audit_found="稽核：{findings} 個問題，於 {conversations} 個對話、{messages} 則訊息、{folds} 次摘要中",
        not_audited="未稽核：{why}",
        ledger_equal="帳目相符：歷史包含每一個已回覆的輪，別無其他",
        ledger_differs="帳目：{conversations} 個歷史與用戶端所知不符",
        judge_clean="裁判無誤：{requests} 個模型請求中，先前的每一輪都恰好依序出現一次，已回報的缺口 {gaps} 則訊息",
        judge_found="裁判：{requests} 個模型請求中有 {violations} 個違規",
        not_judged="未裁判：{why}",
        was_stopped="執行被中止",
        turns_answered="已回覆的輪",
        errors="錯誤",
        turns_a_second="每秒輪數",
        in_flight="進行中的輪",
        active="進行中的對話",
        most_in_flight="進行中的輪，最多",
        most_active="進行中的對話，最多",
        held_back_tile="等待上一輪的輪",
        first_piece_median="第一個 token，中位數",
        memory_median="記憶，中位數",
        retries="重試",
        in_gaps="缺口中的訊息",
        tokens_tile="token：{kind}",
        percentiles="百分位數",
        latency_by_percentile="各百分位數的延遲",
        first_piece_over_time="第一個 token 的時間變化",
        at_once_over_time="同時進行",
        turns_over_time="每秒的輪與錯誤",
        turns="輪",
        messages="訊息",
        seconds="秒",
        nothing_to_show="沒有可顯示的內容",
    ),
    loadtest_help="對伺服器施加負載（預設為專用的伺服器），並檢查每一輪的結果。",
    loadtest_starting="正在啟動專用的 Redis、模型、伺服器與 worker",
    loadtest_judging="等待最後的摘要完成，然後稽核",
    loadtest_progress="{elapsed}/{duration} 秒 · {turns} 輪，進行中 {running}，錯誤 {errors} · "
    "首字 {median} 毫秒，p99 {p99} 毫秒",
    audit_help="檢查所有儲存的內容，或單一對話；--repair 會修復可推導的部分。",
    repair_option="修復可推導的部分；絕不更動訊息。",
    doctor_help="檢查設定、Redis、背景程式與模型，並說明該怎麼做。",
    new_conversation="對話 {id}",
    known_conversation="對話 {id}：共 {messages} 則訊息，其中 {summarized} 則已摘要",
    come_back="下次回來：memora chat -c {id}",
    offline_model="由離線模型依固定規則回答：設定 OPENAI_API_KEY 即可使用真正的模型",
    offline_chosen="依你的要求，由離線模型依固定規則回答",
    no_worker="沒有執行中的背景程式，訊息不會被摘要：請執行 `memora worker`",
    evicts="這個 Redis 在記憶體不足時會丟棄資料，對話也會遺失：請將 maxmemory-policy 設為 noeviction",
    how_to_leave="輸入 /help 看說明 · Ctrl-D 離開",
    leave_hint="按 Ctrl-D 離開聊天",
    words_help="""\
單獨一行輸入 history、context、summary、exit，或加上斜線：
  /history   這個對話的所有訊息
  /context   上一次回答時實際送出的內容
  /summary   代表較早訊息的摘要
  /exit      離開（也可按 Ctrl-D）
  /help      這份說明
若要把這些字當作訊息送給模型，請在前面加一個空格或反斜線：\\history
Alt-Enter（或先按 Esc 再按 Enter）換行。Ctrl-C 停止回答。""",
    unknown_word="沒有 {word} 這個指令，訊息未送出：輸入 /help 查看；前面加空格即可照原樣送出",
    did_you_mean="沒有 {word} 這個指令，訊息未送出。你是指 {guess} 嗎？前面加空格即可照原樣送出",
    interrupted="已停止，沒有儲存任何內容。你的訊息還在，可以再送一次",
    not_stored="沒有儲存任何內容。你的訊息還在，可以再送一次",
    cut_off="回答被截斷（{reason}）",
    gap="有 {count} 則較早的訊息放不下，這次沒有送出",
    folded="已將第 {first}–{last} 則訊息併入摘要（版本 {version}，{tokens} tokens）",
    fold_failed="摘要更新失敗（{reason}），稍後會再試",
    catching_up="離開前更新摘要中（還有 {pending} 則訊息；按 Ctrl-C 略過）",
    not_caught_up="還有 {pending} 則訊息待摘要，下次會處理",
    leaving="下次回來：memora chat -c {id}",
    stored_messages="已儲存的歷史訊息",
    summarized_messages="已摘要的歷史訊息",
    newly_summarized_messages="新摘要的訊息",
    pending_messages="待摘要的訊息",
    context_messages="送出的上下文訊息",
    counted_input_tokens="估算輸入 tokens",
    actual_input_tokens="實際輸入 tokens",
    output_tokens="輸出 tokens",
    summary_update_tokens="摘要更新 tokens",
    session_total_tokens="對話累計 tokens",
    not_said="未回報",
    no_history="還沒有訊息",
    history_title="對話 {id} 的歷史：共 {messages} 則訊息",
    folded_state="已摘要",
    pending_state="待摘要",
    window_state="視窗內",
    user="使用者",
    assistant="助理",
    no_context="還沒有送出任何內容",
    context_title="上一次回答時送出：{messages} 則訊息，{tokens} tokens（上限 {budget}）",
    instructions="指示",
    context_tokens="tokens：指示 {instructions} · 摘要 {summary} · 近期訊息 {tail} · 目前訊息 {message} · "
    "回覆開頭 {reply} · 合計 {total}",
    no_summary="還沒有摘要：共 {messages} 則訊息，{pending} 則待摘要",
    summary_title="摘要，版本 {version}：{messages} 則訊息中的 {summarized} 則，{pending} 則待摘要，{tokens} tokens",
    worker_started="為 {redis} 更新摘要，使用 {model}；按 Ctrl-C 或送 SIGTERM 停止",
    worker_stopping="停止中：進行中的摘要會先完成；再按一次立即停止",
    private_redis="{place} 的私有 Redis",
    server_started="Memora 位於 {url}",
    server_stopping="停止中：進行中的回答會先完成；再按一次立即停止",
    up_ready="全部就緒：{url} · 按 Ctrl-C 停止",
    up_stopping="停止中：先停伺服器，再停背景程式，最後停 Redis；再按一次立即停止",
    up_ended="自行結束，代碼 {code}",
    up_again="{seconds} 秒後重新啟動",
    no_conversations="還沒有對話：執行 `memora chat` 開始",
    id_column="對話",
    messages_column="訊息",
    summarized_column="已摘要",
    pending_column="待摘要",
    version_column="版本",
    tokens_column="tokens",
    active_column="最近活動",
    damaged="已損壞",
    conversation="對話",
    messages="訊息",
    summarized="已摘要",
    pending="待摘要",
    window="視窗內",
    summary="摘要",
    usage="tokens",
    usage_figures="回答 輸入 {answer_in}、輸出 {answer_out} · 摘要 輸入 {fold_in}、輸出 {fold_out} · 合計 {total}",
    generation="世代",
    created="建立時間",
    updated="最近變更",
    fold_due="預定摘要時間",
    fold_failures="摘要失敗次數",
    next_context="下一次上下文",
    next_context_figures="指示 {instructions} · 摘要 {summary} · 近期訊息 {tail} · 合計 {total}（上限 {budget}）· "
    "訊息可用 {room} tokens",
    next_gap="有 {count} 則訊息放不下",
    really_delete="確定永久刪除對話 {id}（共 {messages} 則訊息）？[y/N] ",
    deleted="對話 {id} 已刪除",
    not_deleted="沒有刪除任何內容",
    rebuild_help="用完整的歷史重新製作一個對話的摘要。",
    rollback_help="把一個對話的摘要退回較早的版本；之後的訊息會再次收進摘要。",
    version_option="要退回的摘要版本；0 表示沒有摘要。",
    rebuilding="已收進 {folded}／{total} 則訊息",
    rebuilt="對話 {id}：摘要已重新製作，版本 {version}，涵蓋 {folded} 則訊息",
    rebuild_goes_on="對話 {id}：還有 {pending} 則訊息待處理；worker 會繼續收進摘要",
    rolled_back="對話 {id}：摘要已退回版本 {version}；{pending} 則訊息等待收進摘要",
    audit_keys="每個鍵都屬於某個對話，且型別正確",
    audit_index="清單列出所有對話，且沒有多餘的項目",
    audit_history="歷史由完整的回合組成，每則訊息都可讀取",
    audit_tokens="token 數與重新計算的結果相同",
    audit_folds="摘要更新前後銜接，沒有缺漏或重疊",
    audit_summary="摘要就是最後一次更新的結果，且未超過上限",
    audit_counters="計數與實際內容相符",
    audit_usage="用量包含所有摘要更新的 tokens",
    audit_turns="記住的回合與上一次上下文都在歷史中",
    audit_outbox="待摘要的對話都在等候，且沒有多餘的項目",
    audit_jobs="每個摘要工作都屬於某個對話",
    audit_lifetimes="同一對話的鍵同時到期",
    audit_engine="Redis 不淘汰資料，且全部寫入檔案",
    audit_broken="不成立：{what}（{findings} 項）",
    audit_unchecked="無法檢查：{what}（{reason}）",
    audit_found="發現",
    audit_mended="已修復",
    audit_expected="應為",
    audit_instead="實際",
    audit_key="鍵",
    audit_more="還有 {count} 項；--json 會列出前一千項",
    audit_unread="因不斷重新開始而無法讀取：{ids}",
    audit_figures="{conversations} 個對話、{messages} 則訊息、{folds} 次摘要更新",
    audit_clean="一切正確",
    audit_all_mended="已修復 {mended} 項，一切正確",
    audit_repairable="發現 {findings} 項問題，其中 {mendable} 項可修復：`memora audit --repair`",
    audit_not_repairable="已修復 {mended} 項，還有 {findings} 項無從推導：請還原備份，"
    "或以 redis-cli 保存可讀的內容後執行 `memora delete ID`",
    audit_only_engine="發現 {findings} 項 Redis 本身的問題：`memora doctor` 會說明該如何設定",
    audit_progress="已檢查 {conversations} 個對話、{messages} 則訊息",
    settings_fine="可以讀取",
    settings_unknown="Memora 不認得 {name}：你是指 {guess} 嗎？",
    redis_fine="{server} 在 {place} 正常回應",
    redis_private="{server}，你自己的私有伺服器；資料在 {place}",
    persistence_on="已開啟：重新啟動後對話仍在",
    persistence_off="未開啟：重新啟動會失去所有對話。請以 --appendonly yes 執行 Redis",
    keeps="noeviction：記憶體不足時拒絕寫入，而不是遺忘",
    evicting="記憶體不足時會遺忘對話。請以 --maxmemory-policy noeviction 執行",
    rights_fine="允許腳本，以及 memora:* 與 arq:* 的鍵",
    rights_missing="這個 Redis 使用者不能 {what}：請用 ACL SETUSER 給它 ~memora:* ~arq:* &memora:* 以及相關指令",
    workers_alive="{count} 個執行中",
    worker_comes_with_chat="目前沒有；`memora chat` 會自備",
    worker_missing="沒有執行中的背景程式，訊息不會被摘要：請執行 `memora worker`",
    clock_fine="時鐘相差在 {seconds} 秒內",
    clock_off="Redis 的時鐘與這裡相差 {seconds} 秒：請以 NTP 校時",
    model_fine="{model} 正常回應",
    model_offline="沒有金鑰，使用離線模型：固定規則，並非語言模型。設定 OPENAI_API_KEY 即可使用真正的模型",
    model_offline_chosen="依你的要求使用離線模型：固定規則，並非語言模型",
    settings_check="設定",
    redis_check="Redis",
    persistence_check="持久化",
    eviction_check="資料淘汰",
    rights_check="權限",
    worker_check="背景程式",
    clock_check="時鐘",
    model_check="模型",
)

_LOCALE_VARIABLES: Final = ("LC_ALL", "LC_MESSAGES", "LANG")


def texts_for(lang: str | None = None, environment: Mapping[str, str] = os.environ) -> Texts:
    """The catalogue for a language setting, or by locale where none is set."""
    chosen = lang or environment.get("MEMORA_LANG") or _locale(environment)
    return CHINESE if chosen.lower().startswith("zh") else ENGLISH


def _locale(environment: Mapping[str, str]) -> str:
    return next((environment[name] for name in _LOCALE_VARIABLES if environment.get(name)), "")
