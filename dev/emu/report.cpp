// Options from the environment, the messages about faults, the watchdog, and the exit code: a program in which anything
// was reported exits 1, whatever its own result.
#include <cxxabi.h>
#include <execinfo.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#include <map>
#include <set>
#include <tuple>
#include "internal.h"

namespace emu {

std::atomic<long> report_count{0};
static std::mutex report_lock;
const size_t MOST_REPORTS = 30;                        // printed in full; the rest is counted

// ---------------------------------------------------------------- options
static double number(const char* name, double standard) {
    const char* e = getenv(name);
    if (!e || !*e) return standard;
    char* end;
    double v = strtod(e, &end);
    if (*end || !(v >= 0)) fatal("%s=%s is not a number", name, e);
    return v;
}

static Options read_options() {
    Options o{};
    const char* e = getenv("EMU_ORDER");
    o.order = ORDER_FORWARD;
    if (!e || !*e || !strcmp(e, "forward")) {
    } else if (!strcmp(e, "reverse")) {
        o.order = ORDER_REVERSE;
    } else if (!strncmp(e, "random", 6)) {
        o.order = ORDER_RANDOM;
        o.seed = e[6] == ':' ? (unsigned)strtoul(e + 7, nullptr, 10) : 1;
    } else {
        fatal("EMU_ORDER=%s: forward, reverse or random:SEED", e);
    }
    o.stack = (size_t)number("EMU_STACK", 256) * 1024;
    o.workers = (int)number("EMU_WORKERS", 0);
    const char* lazy = getenv("EMU_LAZY_STREAM");
    bool at_random = lazy && !strncmp(lazy, "random:", 7);
    o.stream_seed = at_random ? (unsigned)strtoul(lazy + 7, nullptr, 10) + 1 : 0;
    o.lazy_streams = at_random || number("EMU_LAZY_STREAM", checking) != 0;
    o.poison = number("EMU_POISON", 1) != 0;
    o.sm = (int)number("EMU_SM", 90);
    o.devices = (int)number("EMU_DEVICES", 1);
    o.memory_gib = number("EMU_MEM", 80);
    o.watchdog = number("EMU_WATCHDOG", 10);
    o.count = number("EMU_COUNT", 0) != 0;
    return o;
}

FILE* count_open() {
    const char* path = getenv("EMU_COUNT_OUT");
    FILE* f = path ? fopen(path, "w") : stderr;
    if (!f) fatal("EMU_COUNT_OUT=%s cannot be written", path);
    return f;
}

bool count_wished() {
    const char* e = getenv("EMU_COUNT");
    return !e || !*e || number("EMU_COUNT", 0) != 0;
}

const Options& options() {
    static const Options o = read_options();
    return o;
}

const Limits& limits() {  // CUDA programming guide, "technical specifications per compute capability"
    static const Limits table[] = {{48 << 10, 163 << 10, 164 << 10, 65536, 2048, 32, 108},
                                   {48 << 10, 99 << 10, 100 << 10, 65536, 1536, 24, 128},
                                   {48 << 10, 227 << 10, 228 << 10, 65536, 2048, 32, 132},
                                   {48 << 10, 227 << 10, 228 << 10, 65536, 2048, 32, 148},
                                   {48 << 10, 99 << 10, 100 << 10, 65536, 1536, 24, 188}};
    switch (options().sm) {
        case 80: return table[0];
        case 86: case 89: return table[1];
        case 90: return table[2];
        case 100: return table[3];
        case 120: return table[4];
    }
    fatal("EMU_SM=%d: 80, 86, 89, 90, 100 or 120", options().sm);
}

// EMU_FAIL=cudaMalloc:7,ncclAllReduce:1
struct Wish { std::string name; long call, seen; };
static std::vector<Wish>& wishes() {
    static std::vector<Wish>* all = [] {               // still there when the program ends
        auto* v = new std::vector<Wish>;
        const char* e = getenv("EMU_FAIL");
        for (std::string s = e ? e : ""; !s.empty();) {
            std::string one = s.substr(0, s.find(','));
            s = s.find(',') == std::string::npos ? "" : s.substr(s.find(',') + 1);
            size_t colon = one.find(':');
            v->push_back({one.substr(0, colon), colon == std::string::npos ? 1 : atol(one.c_str() + colon + 1), 0});
        }
        return v;
    }();
    return *all;
}

bool failing(const char* function) {
    bool fails = false;
    for (Wish& w : wishes()) {
        std::lock_guard<std::mutex> lock(report_lock);
        if ((w.name != function && w.name + "_v2" != function) || ++w.seen != w.call) continue;
        fprintf(stderr, "emu: EMU_FAIL: call %ld of %s fails as asked\n", w.call, w.name.c_str());
        fails = true;
    }
    return fails;
}

// ---------------------------------------------------------------- where and who
static std::string program() {
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    return std::string(path, n > 0 ? (size_t)n : 0);
}

static bool ours(const char* line) {                   // headers that stand between the user's line and us
    for (const char* h : {"/emu.h:", "/emu_math.h:", "/emu_host.h:", "/ptx.cuh:", "cuda_bf16", "cuda_fp16",
                          "cuda_runtime.h", "cuda_pipeline", "/cooperative_groups", "vector_functions", "/c++/", "??:"})
        if (strstr(line, h)) return true;
    return false;
}

std::string where(const void* pc) {
    static auto& memo = *new std::map<const void*, std::string>;  // at_exit() reports, too
    std::string& m = memo[pc];
    if (!m.empty() || !pc) return m.empty() ? "?" : m;
    std::string command = "addr2line -i -e '" + program() + "' 0x";
    char line[4096], best[4096] = "";
    snprintf(line, sizeof line, "%zx 2>/dev/null", (size_t)pc - 1);
    FILE* f = popen((command + line).c_str(), "r");
    while (f && fgets(line, sizeof line, f)) {
        if (!best[0] || ours(best)) strcpy(best, line);
    }
    if (f) pclose(f);
    best[strcspn(best, " \n")] = 0;
    char* slash = strrchr(best, '/');
    if (!best[0] || best[0] == '?') snprintf(best, sizeof best, "%p", pc), slash = nullptr;
    return m = slash ? slash + 1 : best;
}

std::string thread_name(int linear, dim3 block) {
    unsigned i = (unsigned)linear;
    return "(" + std::to_string(i % block.x) + "," + std::to_string(i / block.x % block.y) + "," +
           std::to_string(i / block.x / block.y) + ")";
}

std::string block_name(long linear, dim3 grid) {
    return "(" + std::to_string(linear % grid.x) + "," + std::to_string(linear / grid.x % grid.y) + "," +
           std::to_string(linear / grid.x / grid.y) + ")";
}

std::string who() {
    Thread* t = this_thread();
    if (!worker || !worker->block || !worker->grid.load()) return running_op ? running_op->name : "host";
    std::string s = std::string("kernel ") + worker->block->grid->config.name + ", block " +
                    block_name(worker->block->linear, gridDim);
    return t ? s + ", thread " + thread_name(t->linear, blockDim) : s;
}

// ---------------------------------------------------------------- reports
static bool first_time(const char* kind, const std::string& here, const std::string& there) {
    report_count++;
    static auto& seen = *new std::set<std::tuple<std::string, std::string, std::string>>;
    bool fresh = seen.insert(std::make_tuple(std::string(kind), std::min(here, there), std::max(here, there))).second;
    if (fresh && seen.size() == MOST_REPORTS + 1) fprintf(stderr, "emu: more reports are counted, not printed\n");
    return fresh && seen.size() <= MOST_REPORTS;
}

static void print(const char* kind, const std::string& here, const std::string& there, const char* format, va_list ap) {
    ThreadId* me = cur;
    if (first_time(kind, here, there)) {
        char text[3000];
        vsnprintf(text, sizeof text, format, ap);
        fflush(stdout);
        fprintf(stderr, "emu: %s: %s: %s\nemu:     by %s\n", here.c_str(), kind, text, who().c_str());
    }
    cur = me;
}

void report(const char* kind, void* pc, void* other_pc, const char* format, ...) {
    std::lock_guard<std::mutex> lock(report_lock);
    va_list ap;
    va_start(ap, format);
    print(kind, where(pc), other_pc ? where(other_pc) : "", format, ap);
    va_end(ap);
}

void report_at(const char* kind, const char* file, int line, const char* format, ...) {
    std::lock_guard<std::mutex> lock(report_lock);
    va_list ap;
    va_start(ap, format);
    const char* slash = file ? strrchr(file, '/') : nullptr;
    print(kind, std::string(slash ? slash + 1 : file ? file : "?") + ":" + std::to_string(line), "", format, ap);
    va_end(ap);
}

void fatal(const char* format, ...) {
    va_list ap;
    va_start(ap, format);
    fflush(stdout);
    fprintf(stderr, "emu: error: ");
    vfprintf(stderr, format, ap);
    fprintf(stderr, "\n");
    if (cur) fprintf(stderr, "emu:     by %s\n", who().c_str());
    _exit(1);
}

// ---------------------------------------------------------------- the watchdog and faults of the machine
struct Watched { pthread_t thread; Worker* worker; long progress; double since; };
static std::mutex watched_lock;
static std::vector<Watched>& watched = *new std::vector<Watched>;       // outlives every thread

static std::string interrupted(void* context) {        // the line of the instruction where the signal came
#if defined(__x86_64__)
    return where((char*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP] + 1);
#elif defined(__aarch64__)
    return where((char*)((ucontext_t*)context)->uc_mcontext.pc + 1);
#else
    return (void)context, "?";
#endif
}

static void on_hang(int, siginfo_t*, void* context) {
    fprintf(stderr,
            "emu: %s: watchdog: no thread made progress for %g s of processor time (EMU_WATCHDOG)\nemu:     by %s\n",
            interrupted(context).c_str(), options().watchdog, who().c_str());
    fflush(stdout);
    _exit(1);
}

__attribute__((unused)) static void on_fault(int signal, siginfo_t* info, void* context) {
    static std::atomic<int> entered_before{0};
    if (entered_before++) _exit(1);
    const char* what = signal == SIGFPE ? "division by zero or overflow"
                       : fiber_in_stack(info->si_addr)
                           ? "stack overflow: local memory is used up (EMU_STACK gives a thread more KiB)"
                           : "memory fault";
    fflush(stdout);
    fprintf(stderr, "emu: %s: %s at address %p\nemu:     by %s\n", interrupted(context).c_str(), what, info->si_addr,
            who().c_str());
    _exit(1);
}

// Seconds of processor time a thread has used: a machine that is busy with other work is no hang.
static double used(pthread_t thread) {
    clockid_t id;
    struct timespec t;
    if (pthread_getcpuclockid(thread, &id) || clock_gettime(id, &t)) return 0;
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void* watchdog(void*) {
    for (;;) {
        usleep(200000);
        std::lock_guard<std::mutex> lock(watched_lock);
        for (Watched& w : watched) {
            long p = w.worker->progress;
            if (!w.worker->grid.load() || p != w.progress) {
                w.progress = p;
                w.since = used(w.thread);
            } else if (used(w.thread) - w.since > options().watchdog) {
                pthread_kill(w.thread, SIGUSR2);
                w.since = used(w.thread);
            }
        }
    }
    return nullptr;
}

__attribute__((unused)) static void signal_stack() {
    stack_t s = {};
    s.ss_size = 256 * 1024;
    s.ss_sp = malloc(s.ss_size);
    sigaltstack(&s, nullptr);
}

static void handle(int signal, void (*handler)(int, siginfo_t*, void*)) {
    struct sigaction a = {};
    a.sa_sigaction = handler;
    a.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(signal, &a, nullptr);
}

struct Unwatch {                 // a host thread that launched kernels ends
    ~Unwatch() {
        std::lock_guard<std::mutex> lock(watched_lock);
        for (size_t i = 0; i < watched.size(); i++)
            if (pthread_equal(watched[i].thread, pthread_self())) watched.erase(watched.begin() + (long)i--);
    }
};

void watch_thread() {
    static thread_local Unwatch at_end;
    (void)&at_end;
    std::lock_guard<std::mutex> lock(watched_lock);
    watched.push_back({pthread_self(), worker, 0, used(pthread_self())});
#if !defined(EMU_ASAN)           // AddressSanitizer has its own stack and handlers for these
    signal_stack();
#endif
    static bool installed;
    if (installed) return;
    installed = true;
#if !defined(EMU_ASAN)
    handle(SIGSEGV, on_fault);
    handle(SIGBUS, on_fault);
    handle(SIGFPE, on_fault);
#endif
    if (options().watchdog <= 0) return;
    handle(SIGUSR2, on_hang);
    pthread_t t;
    pthread_create(&t, nullptr, watchdog, nullptr);
    pthread_detach(t);
}

// ---------------------------------------------------------------- the exit code
static void at_exit() {
    drain_for_exit();
    check_exit();
    for (Wish& w : wishes())
        if (w.seen < w.call)
            fprintf(stderr, "emu: EMU_FAIL=%s:%ld: there were only %ld such calls\n", w.name.c_str(), w.call, w.seen);
    fflush(stdout);
    fflush(stderr);
    if (!report_count) return;
    fprintf(stderr, "emu: %ld report%s: exit code 1\n", report_count.load(), report_count == 1 ? "" : "s");
    _exit(1);
}

__attribute__((constructor(101))) static void install() { atexit(at_exit); }     // registered first, so it runs last

}
