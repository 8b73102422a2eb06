"""Checks that every C++ file includes what it uses of Abseil and of the standard library.

A header that arrives only through another header may be missing with another version of a library.
So a file that uses a name includes the name's header, or the file's own header does: foo.h for
foo.cc and foo_test.cc. The tables below have each name's header. The test also fails for a name of
absl:: or std:: that the tables lack."""

import functools
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path("README.md").resolve().parent
SUFFIXES = (".cc", ".cu", ".h")

# The names that each header declares. For a name of several headers, any one of them suffices. A
# name that ends with * stands for all names that begin so.
ABSL = {
    "absl/algorithm/container.h": "c_*",
    "absl/cleanup/cleanup.h": "Cleanup MakeCleanup",
    "absl/container/fixed_array.h": "FixedArray",
    "absl/container/flat_hash_map.h": "flat_hash_map",
    "absl/container/flat_hash_set.h": "flat_hash_set",
    "absl/container/inlined_vector.h": "InlinedVector",
    "absl/functional/any_invocable.h": "AnyInvocable",
    "absl/functional/bind_front.h": "bind_front",
    "absl/functional/function_ref.h": "FunctionRef",
    "absl/memory/memory.h": "WrapUnique",
    "absl/status/status.h": """Status StatusCode StatusCodeToString OkStatus ErrnoToStatus
        AbortedError AlreadyExistsError CancelledError DataLossError DeadlineExceededError
        FailedPreconditionError InternalError InvalidArgumentError NotFoundError OutOfRangeError
        PermissionDeniedError ResourceExhaustedError UnauthenticatedError UnavailableError
        UnimplementedError UnknownError IsAborted IsAlreadyExists IsCancelled IsDataLoss
        IsDeadlineExceeded IsFailedPrecondition IsInternal IsInvalidArgument IsNotFound
        IsOutOfRange IsPermissionDenied IsResourceExhausted IsUnauthenticated IsUnavailable
        IsUnimplemented IsUnknown""",
    "absl/status/statusor.h": "StatusOr",
    "absl/strings/ascii.h": """ascii_* AsciiStrToLower AsciiStrToUpper StripAsciiWhitespace
        StripLeadingAsciiWhitespace StripTrailingAsciiWhitespace""",
    "absl/strings/cord.h": "Cord",
    "absl/strings/escaping.h": """Base64Escape Base64Unescape BytesToHexString CEscape CHexEscape
        CUnescape HexStringToBytes Utf8SafeCEscape Utf8SafeCHexEscape WebSafeBase64Escape
        WebSafeBase64Unescape""",
    "absl/strings/match.h": """EndsWith EndsWithIgnoreCase EqualsIgnoreCase StartsWith
        StartsWithIgnoreCase StrContains""",
    "absl/strings/numbers.h": "SimpleAtob SimpleAtod SimpleAtof SimpleAtoi SimpleHexAtoi",
    "absl/strings/str_cat.h": "AlphaNum Dec Hex StrAppend StrCat kZeroPad*",
    "absl/strings/str_format.h": """FPrintF FormatSpec ParsedFormat PrintF SNPrintF
        StrAppendFormat StrFormat""",
    "absl/strings/str_join.h": "PairFormatter StrJoin",
    "absl/strings/str_replace.h": "StrReplaceAll",
    "absl/strings/str_split.h": """ByAnyChar ByChar ByString MaxSplits SkipEmpty SkipWhitespace
        StrSplit""",
    "absl/strings/string_view.h": "string_view",
    "absl/strings/strip.h": "ConsumePrefix ConsumeSuffix StripPrefix StripSuffix",
    "absl/synchronization/barrier.h": "Barrier",
    "absl/synchronization/blocking_counter.h": "BlockingCounter",
    "absl/synchronization/mutex.h": """CondVar Condition Mutex MutexLock OnDeadlockCycle
        ReaderMutexLock ReleasableMutexLock SetMutexDeadlockDetectionMode WriterMutexLock
        kConstInit""",
    "absl/base/const_init.h": "kConstInit",
    "absl/synchronization/notification.h": "Notification",
    "absl/time/clock.h": "GetCurrentTimeNanos Now SleepFor",
    "absl/time/time.h": """AbsDuration Ceil Duration DurationFromTimespec DurationFromTimeval
        FDivDuration Floor FormatDuration FormatTime FromChrono FromTM FromTimeT FromUnixMicros
        FromUnixMillis FromUnixNanos FromUnixSeconds Hours IDivDuration InfiniteDuration
        InfiniteFuture InfinitePast LoadTimeZone LocalTimeZone Microseconds Milliseconds Minutes
        Nanoseconds ParseDuration ParseTime Seconds Time TimeFromTimespec TimeZone
        ToChronoNanoseconds ToChronoTime ToDoubleMicroseconds ToDoubleMilliseconds
        ToDoubleSeconds ToInt64Microseconds ToInt64Milliseconds ToInt64Nanoseconds ToInt64Seconds
        ToTimeT ToTimespec ToTimeval ToUnixMicros ToUnixMillis ToUnixNanos ToUnixSeconds Trunc
        UTCTimeZone UnixEpoch ZeroDuration""",
    "absl/types/optional.h": "optional",
    "absl/types/span.h": "MakeConstSpan MakeSpan Span",
}

STD = {
    "algorithm": """adjacent_find all_of any_of binary_search clamp copy copy_backward copy_if
        copy_n count count_if equal equal_range fill fill_n find find_first_of find_if
        find_if_not for_each generate includes inplace_merge is_sorted lexicographical_compare
        lower_bound make_heap max max_element merge min min_element minmax minmax_element
        mismatch next_permutation none_of nth_element partial_sort partition partition_point
        pop_heap push_heap remove remove_if replace replace_if reverse rotate sample search
        set_difference set_intersection set_union shuffle sort sort_heap stable_partition
        stable_sort swap_ranges transform unique upper_bound""",
    "any": "any any_cast",
    "array": "array get size begin end data tuple_size to_array",
    "atomic": "atomic atomic_flag atomic_ref atomic_* memory_order memory_order_*",
    "barrier": "barrier",
    "bit": """bit_cast bit_ceil bit_floor bit_width countl_zero countr_zero endian has_single_bit
        popcount rotl""",
    "bitset": "bitset",
    "cfenv": "fegetenv fegetround fenv_t fesetenv fesetround",
    "charconv": "chars_format from_chars to_chars",
    "chrono": "chrono",
    "cmath": """abs acos acosh asin atan atan2 cbrt ceil copysign cos cosh erf exp exp2 expm1
        fabs floor fma fmax fmin fmod fpclassify frexp hypot ilogb isfinite isinf isnan isnormal
        ldexp lgamma llround log log10 log1p log2 logb lround modf nan nanf nearbyint nextafter
        pow remainder rint round scalbn signbit sin sinh sqrt tan tanh trunc""",
    "compare": "partial_ordering strong_ordering weak_ordering",
    "complex": "complex",
    "concepts": "convertible_to derived_from floating_point integral invocable same_as",
    "condition_variable": "condition_variable",
    "csignal": "raise sig_atomic_t signal",
    "cstdarg": "va_list",
    "cstddef": "byte max_align_t nullptr_t ptrdiff_t size_t",
    "cstdint": """int8_t int16_t int32_t int64_t intptr_t uint8_t uint16_t uint32_t uint64_t
        uintptr_t uintmax_t intmax_t""",
    "cstdio": """FILE fclose feof ferror fflush fgetc fgets fopen fprintf fputc fputs fread
        fscanf fwrite getchar perror printf putchar puts remove rename snprintf sscanf tmpfile
        vsnprintf""",
    "cstdlib": """abort abs aligned_alloc atexit atof atoi atol calloc exit free getenv malloc
        qsort quick_exit realloc strtod strtof strtol strtoll strtoul strtoull system _Exit""",
    "cstring": """memchr memcmp memcpy memmove memset strcat strchr strcmp strcpy strerror strlen
        strncmp strncpy strrchr strstr strtok""",
    "ctime": "clock gmtime localtime mktime strftime time time_t tm",
    "deque": "deque erase erase_if size begin end data",
    "exception": """current_exception exception exception_ptr make_exception_ptr
        rethrow_exception set_terminate terminate uncaught_exceptions""",
    "filesystem": "filesystem",
    "forward_list": "forward_list",
    "fstream": "filebuf fstream ifstream ofstream ios",
    "functional": """bind function greater greater_equal hash invoke less less_equal minus
        multiplies not_fn plus ref cref reference_wrapper equal_to""",
    "future": "async future future_status launch packaged_task promise shared_future",
    "initializer_list": "initializer_list begin end size",
    "iomanip": "put_time quoted setfill setprecision setw",
    "ios": "fixed hex ios ios_base scientific streamoff streamsize",
    "iosfwd": "istream ostream",
    "iostream": "cerr cin clog cout istream ostream ios flush endl ws",
    "istream": "iostream istream ws ios",
    "iterator": """advance back_inserter begin data distance empty end front_inserter inserter
        istream_iterator istreambuf_iterator iterator_traits make_move_iterator
        make_reverse_iterator next ostream_iterator ostreambuf_iterator prev rbegin rend
        reverse_iterator size ssize""",
    "latch": "latch",
    "limits": "numeric_limits",
    "list": "erase_if list begin end size",
    "map": "erase_if map multimap begin end size",
    "memory": """addressof align allocator allocator_traits assume_aligned default_delete
        destroy_at enable_shared_from_this make_shared make_unique owner_less shared_ptr
        static_pointer_cast to_address unique_ptr uninitialized_* weak_ptr""",
    "mutex": "call_once lock_guard mutex once_flag recursive_mutex scoped_lock try_to_lock unique_lock",
    "new": "align_val_t bad_alloc launder nothrow nothrow_t set_new_handler",
    "numbers": "numbers",
    "numeric": """accumulate adjacent_difference gcd inner_product iota lcm midpoint partial_sum
        reduce""",
    "optional": "bad_optional_access make_optional nullopt nullopt_t optional",
    "ostream": "endl flush ostream ios",
    "queue": "priority_queue queue",
    "random": """bernoulli_distribution discrete_distribution exponential_distribution
        generate_canonical geometric_distribution lognormal_distribution mt19937 mt19937_64
        normal_distribution poisson_distribution random_device seed_seq uniform_int_distribution
        uniform_real_distribution""",
    "ranges": "ranges views",
    "ratio": "ratio milli micro nano",
    "regex": "regex regex_match regex_replace regex_search smatch",
    "semaphore": "binary_semaphore counting_semaphore",
    "set": "erase_if multiset set begin end size",
    "shared_mutex": "shared_lock shared_mutex",
    "source_location": "source_location",
    "span": "as_bytes dynamic_extent span",
    "sstream": "istringstream ostringstream stringbuf stringstream ios",
    "stdexcept": """domain_error invalid_argument length_error logic_error out_of_range
        overflow_error range_error runtime_error""",
    "stop_token": "stop_callback stop_source stop_token",
    "streambuf": "streambuf",
    "string": """basic_string char_traits erase erase_if getline stod stof stoi stol stoll stoul
        stoull string to_string u16string wstring begin end size data""",
    "string_view": "string_view",
    "system_error": """errc error_category error_code error_condition generic_category
        make_error_code system_category system_error""",
    "thread": "jthread this_thread thread",
    "tuple": """apply forward_as_tuple get ignore make_tuple tie tuple tuple_element_t
        tuple_size_v""",
    "type_traits": """add_const_t bool_constant common_type_t conditional_t decay_t enable_if_t
        false_type integral_constant invoke_result_t is_* make_signed_t make_unsigned_t
        remove_const_t remove_cv_t remove_cvref_t remove_pointer_t remove_reference_t true_type
        type_identity_t underlying_type_t void_t""",
    "typeindex": "type_index",
    "unordered_map": "erase_if unordered_map unordered_multimap begin end size",
    "unordered_set": "erase_if unordered_set begin end size",
    "utility": """as_const cmp_* declval exchange forward get in_place index_sequence
        index_sequence_for in_range integer_sequence make_index_sequence make_pair move pair
        piecewise_construct swap to_underlying""",
    "valarray": "valarray",
    "variant": "bad_variant_access get get_if holds_alternative monostate variant visit",
    "vector": "erase erase_if vector begin end size data",
}

# Names without a namespace.
GLOBAL = {
    "absl/base/attributes.h": "ABSL_CONST_INIT ABSL_MUST_USE_RESULT",
    "absl/base/config.h": "ABSL_HAVE_* ABSL_NAMESPACE_*",
    "absl/base/internal/raw_logging.h": "ABSL_RAW_*",
    "absl/base/thread_annotations.h": """ABSL_ACQUIRED_AFTER ABSL_ACQUIRED_BEFORE
        ABSL_EXCLUSIVE_* ABSL_GUARDED_BY ABSL_LOCKABLE ABSL_LOCKS_EXCLUDED ABSL_LOCK_RETURNED
        ABSL_NO_THREAD_SAFETY_ANALYSIS ABSL_PT_GUARDED_BY ABSL_SCOPED_LOCKABLE ABSL_SHARED_*
        ABSL_UNLOCK_FUNCTION""",
    "cassert": "assert",
    "cerrno": "errno",
    "climits": "CHAR_BIT INT_MAX INT_MIN LONG_MAX LONG_MIN UINT_MAX ULONG_MAX",
    "cstdint": STD["cstdint"]
    + " INT32_MAX INT64_MAX SIZE_MAX UINT16_MAX UINT32_MAX UINT64_MAX UINT8_MAX",
    "cstring": "memchr memcmp memcpy memmove memset strcmp strerror strlen",
}


def c_header(header):
    """Returns the C name of a C++ header, as errno.h for cerrno. Other names stay as they are."""
    return re.sub(r"^c(assert|errno|fenv|limits|math|signal|std\w+|string|time)$", r"\1.h", header)


def headers_by_name():
    """Returns the headers of each name. A name that ends with * stands for all that begin so."""
    headers = {}
    for prefix, table in (("absl::", ABSL), ("std::", STD), ("", GLOBAL)):
        for header, names in table.items():
            for name in names.split():
                headers.setdefault(prefix + name, {}).update({header: 0, c_header(header): 0})
    return {name: tuple(those) for name, those in headers.items()}


NAMES = headers_by_name()
BEGINNINGS = [name.rstrip("*") for name in NAMES if name.endswith("*")]


@functools.cache
def headers_of(name):
    """Returns the headers of which a name needs any one, and none for an unknown name."""
    if name in NAMES:
        return NAMES[name]
    beginning = max(filter(name.startswith, BEGINNINGS), key=len, default="unknown")
    return NAMES.get(beginning + "*", ())


# Matches an #include, a comment, a string or a character. In 1'000, the ' starts no character.
NO_CODE = re.compile(
    r"""
    ^[ \t]*\#[ \t]*include[ \t]*[<"](?P<header>[^>"\n]+)[>"]
    | //[^\n]*
    | /\*.*?\*/
    | R"(?P<delimiter>[^\s()\\]{0,16})\(.*?\)(?P=delimiter)"
    | "(?:[^"\\\n]|\\.)*"
    | (?<!\w)'(?:[^'\\\n]|\\.)+'
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
GLOBAL_NAMES = "|".join(name for name in NAMES if not re.search(r"::|\*", name))
USE = re.compile(
    r"\b(?:absl|std)::[A-Za-z_]\w*|(?<![\w.>])(?<!\w::)(?:ABSL_\w+|(?:%s)\b)" % GLOBAL_NAMES
)


def read(text):
    """Returns the headers that a text includes, and the (name, line) of each name that it uses."""
    headers = set()

    def blank(match):
        if match["header"]:
            headers.add(match["header"])
        return "\n" * match[0].count("\n") or " "

    lines = NO_CODE.sub(blank, text).split("\n")
    return headers, [(name, i + 1) for i, line in enumerate(lines) for name in USE.findall(line)]


def own_header(path):
    """Returns foo.h for foo.cc, foo.cu, foo_fuzzer.cc, foo_test.cc, and for foo.h itself."""
    return re.sub(r"(_fuzzer|_test)?\.(cc|cu)$", ".h", path)


def missing_includes(sources):
    """Returns one message for each header that a file lacks. sources has each path's text."""
    contents = {path: read(text) for path, text in sources.items()}
    missing = {}
    for path, (headers, uses) in contents.items():
        own = own_header(path)
        if own in headers and own in contents:
            headers = headers | contents[own][0]
        for name, line in uses:
            wanted = headers_of(name)
            if not wanted:
                message = f"{path}:{line}: {name} has no header in tests/includes_test.py"
                missing.setdefault((path, name), message)
            elif headers.isdisjoint(wanted):
                message = f"{path}:{line}: {name} needs #include of {' or '.join(wanted)}"
                missing.setdefault((path, wanted), message)
    return list(missing.values())


def cpp_sources():
    """Returns the text of each C++ file of the source tree, by its path."""

    def stop(error):
        raise error

    sources = {}
    for folder, folders, files in os.walk(ROOT, onerror=stop):
        # Tools write into these folders. os.walk does not follow links, such as those of Bazel.
        folders[:] = [f for f in folders if not re.match(r"\.|(node_modules|signpost-demo)$", f)]
        for path in (Path(folder, file) for file in files if file.endswith(SUFFIXES)):
            sources[str(path.relative_to(ROOT))] = path.read_text()
    return dict(sorted(sources.items()))


SOURCES = cpp_sources()


def test_files_include_what_they_use():
    missing = missing_includes(SOURCES)
    if missing:
        pytest.fail("\n".join(missing), pytrace=False)


def test_no_source_that_git_knows_is_missed():
    if not (ROOT / ".git").exists():
        pytest.skip("only a checkout has a list of its files")
    patterns = [f"*{suffix}" for suffix in SUFFIXES]
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, check=True, capture_output=True, text=True
    )
    tracked = {path for path in listed.stdout.split("\0") if path and (ROOT / path).exists()}
    assert tracked and tracked <= SOURCES.keys()


STR_CAT = "a/b.cc:2: absl::StrCat needs #include of absl/strings/str_cat.h"


@pytest.mark.parametrize(
    "sources, messages",
    [
        ({"a/b.cc": "\nabsl::StrCat(1);\nabsl::StrAppend(&a, 1);"}, [STR_CAT]),
        ({"a/b.cc": '#include "absl/strings/str_cat.h"\nabsl::StrCat(1);'}, []),
        ({"a/b.cc": '// #include "absl/strings/str_cat.h"\nabsl::StrCat(1);'}, [STR_CAT]),
        # Another file's header does not count; the own header does.
        (
            {
                "a/b.cc": '#include "a/c.h"\nabsl::StrCat(1);',
                "a/c.h": '#include "absl/strings/str_cat.h"',
            },
            [STR_CAT],
        ),
        (
            {
                "a/b_test.cc": '#include "a/b.h"\nabsl::StrCat(1);',
                "a/b.h": '#include "absl/strings/str_cat.h"',
            },
            [],
        ),
        # A file that does not include its own header has nothing of it.
        (
            {"a/b.cc": "\nabsl::StrCat(1);", "a/b.h": '#include "absl/strings/str_cat.h"'},
            [STR_CAT],
        ),
        # Comments and strings use no names.
        ({"a/b.h": '// std::string\n/* std::string\n*/ "std::string" R"(" std::string)"'}, []),
        ({"a/b.h": "\n1'000'000; std::move(a);"}, ["a/b.h:2: std::move needs #include of utility"]),
        (
            {"a/b.h": '"\\"" \'"\' assert(a);'},
            ["a/b.h:1: assert needs #include of cassert or assert.h"],
        ),
        # One of a name's headers suffices.
        ({"a/b.h": "#include <cmath>\nstd::abs(a);"}, []),
        ({"a/b.h": "#include <stdint.h>\nuint8_t a;"}, []),
        # A name with a known beginning has its header; one that is not known fails.
        (
            {"a/b.h": "absl::c_sort(a);"},
            ["a/b.h:1: absl::c_sort needs #include of absl/algorithm/container.h"],
        ),
        ({"a/b.h": "std::b;"}, ["a/b.h:1: std::b has no header in tests/includes_test.py"]),
        # A member may have a name that a table has.
        ({"a/b.h": "a.errno + a->errno + a::errno"}, []),
    ],
)
def test_messages_name_what_is_missing(sources, messages):
    assert missing_includes(sources) == messages
