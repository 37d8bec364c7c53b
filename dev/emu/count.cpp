// Memory counters (EMU_COUNT=1, or emu::count_kernels(), with --check): what the GPU's memory system would have been asked
// for, without a GPU.
// The k-th execution of one instruction by the lanes of a warp is one request. A global request needs some 32-byte
// sectors, a shared one some wavefronts (passes over the 32 banks); both are compared with the least that could do.
#include <string.h>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include "internal.h"

namespace emu {

bool counting;
static bool wanted;              // by the program: count_kernels()
struct Request { uintptr_t at[32]; uint8_t n[32]; };
struct Key {
    uint32_t pc;
    uint32_t block;
    uint32_t time;               // which execution
    uint16_t warp;
    bool shared, write;
    bool operator==(const Key& o) const {
        return pc == o.pc && block == o.block && time == o.time && warp == o.warp && shared == o.shared &&
               write == o.write;
    }
};
struct KeyHash {
    size_t operator()(const Key& k) const {
        return ((((size_t)k.pc * 31 + k.block) * 31 + k.time) * 31 + k.warp) * 4 + k.shared * 2 + k.write;
    }
};
struct Line { long requests, lanes, got, ideal; int width; };
struct Launches { long launches, read, written, mma; double read_footprint, write_footprint; };
struct Last { uint32_t pc; uintptr_t at; size_t n; Request* request; };

// Never destroyed: kernels may still run at exit.
static auto& requests = *new std::unordered_map<Key, Request, KeyHash>;
static auto& executions = *new std::unordered_map<uint64_t, uint32_t>;  // (pc, thread, space) -> how often so far
static auto& last_access = *new std::unordered_map<uint64_t, Last>;     // (block, thread, read or write)
static auto& sectors_read = *new std::unordered_set<uintptr_t>;
static auto& sectors_written = *new std::unordered_set<uintptr_t>;
static Launches current;
typedef std::tuple<std::string, std::string, bool, bool> LineName;     // kernel, line, shared, write
static std::map<LineName, Line>& lines() { static auto* m = new std::map<LineName, Line>; return *m; }
static std::map<std::string, Launches>& kernels() { static auto* m = new std::map<std::string, Launches>; return *m; }
const long SAMPLED = 8;          // blocks of a launch whose requests are looked at one by one

static bool sampled(const Grid& g, long block) {
    long step = g.blocks > SAMPLED ? g.blocks / SAMPLED : 1;
    return block % step == 0;
}

static void footprint(uintptr_t a, size_t n, bool write) {
    auto& set = write ? sectors_written : sectors_read;
    for (uintptr_t s = a / 32; s <= (a + n - 1) / 32; s++) set.insert(s);
    (write ? current.written : current.read) += (long)n;
}

// The compiler splits the copy of a float4 into four accesses of one line; they are one access on the GPU.
static bool continues(Last& last, const void* pc, uintptr_t a, size_t n, int lane) {
    if (!last.request || last.pc == (uint32_t)(uintptr_t)pc || last.at + last.n != a || last.n + n > 16) return false;
    if (last.at % 8 || where((void*)(uintptr_t)last.pc) != where(pc)) return false;
    last.n += n;
    last.pc = (uint32_t)(uintptr_t)pc;
    last.request->n[lane] = (uint8_t)last.n;
    return true;
}

void count_access(const void* pc, const Thread* t, uintptr_t a, size_t n, bool shared, bool write) {
    Block* b = worker->block;
    if (!shared) footprint(a, n, write);
    if (!sampled(*b->grid, b->linear) || n > 16) return;
    Last& last = last_access[((uint64_t)b->linear << 12 | (uint64_t)t->linear) << 1 | write];
    if (continues(last, pc, a, n, t->lane)) return;
    uint64_t instruction =
        (uint64_t)(uint32_t)(uintptr_t)pc << 32 | (uint64_t)(b->linear & 0xfffff) << 12 | (uint64_t)t->linear;
    uint32_t time = executions[instruction * 2 + shared]++;
    Request& r = requests[{(uint32_t)(uintptr_t)pc, (uint32_t)b->linear, time, (uint16_t)t->warp, shared, write}];
    r.at[t->lane] = a;
    r.n[t->lane] = (uint8_t)n;
    last = {(uint32_t)(uintptr_t)pc, a, n, &r};
}

static void add_global(const Request& r, Line& u) {
    std::set<uintptr_t> sectors;
    std::set<uintptr_t> words;
    for (int l = 0; l < 32; l++) {
        if (!r.n[l]) continue;
        for (uintptr_t s = r.at[l] / 32; s <= (r.at[l] + r.n[l] - 1) / 32; s++) sectors.insert(s);
        for (int k = 0; k < r.n[l]; k++) words.insert(r.at[l] + (uintptr_t)k);
    }
    u.got += (long)sectors.size();
    u.ideal += (long)(words.size() + 31) / 32;
}

// 16-byte accesses go in four groups of 8 lanes, 8-byte ones in two of 16; a group takes as many passes as its busiest
// bank has different words.
static void add_shared(const Request& r, Line& u, int width) {
    int group = width > 8 ? 8 : width > 4 ? 16 : 32;
    for (int g = 0; g < 32; g += group) {
        std::set<uintptr_t> bank[32];
        bool any = false;
        for (int l = g; l < g + group; l++) {
            for (int k = 0; k < r.n[l]; k += 4)
                bank[(r.at[l] + (uintptr_t)k) / 4 % 32].insert((r.at[l] + (uintptr_t)k) / 4);
            any |= r.n[l] != 0;
        }
        size_t passes = 0;
        for (auto& x : bank) passes = std::max(passes, x.size());
        u.got += (long)passes;
        u.ideal += any;
    }
}

void count_launch_begin(Grid&) {
    counting = options().count || wanted;
    current = {};
}

void count_launch_end(Grid& g) {
    if (!counting) return;
    for (auto& x : requests) {
        Line& u = lines()[std::make_tuple(std::string(g.config.name), where((void*)(uintptr_t)x.first.pc),
                                          x.first.shared, x.first.write)];
        int width = 0;
        for (int l = 0; l < 32; l++) {
            width = std::max(width, (int)x.second.n[l]);
            u.lanes += x.second.n[l] != 0;
        }
        u.requests++;
        u.width = std::max(u.width, width);
        if (x.first.shared) add_shared(x.second, u, width);
        else add_global(x.second, u);
    }
    Launches& k = kernels()[g.config.name];
    k.launches++;
    k.read += current.read;
    k.written += current.written;
    k.mma += current.mma;
    k.read_footprint += 32.0 * (double)sectors_read.size();
    k.write_footprint += 32.0 * (double)sectors_written.size();
    requests.clear();
    executions.clear();
    last_access.clear();
    sectors_read.clear();
    sectors_written.clear();
    counting = false;
}

void count_mma() { current.mma++; }

void count_kernels() { wanted = count_wished(); }

// got over least, summed over the lines of a kernel; "-" where it has no such request
static std::string over_least(const std::string& kernel, bool shared) {
    double got = 0, ideal = 0;
    for (auto& x : lines()) {
        if (std::get<0>(x.first) != kernel || std::get<2>(x.first) != shared) continue;
        got += (double)x.second.got;
        ideal += (double)x.second.ideal;
    }
    char text[32] = "-";
    if (ideal > 0) snprintf(text, sizeof(text), "%.2f", got / ideal);
    return text;
}

// A row a kernel: bytes asked for, how often the bytes touched at all (1.00: once), requests over the least possible.
void count_table(FILE* f) {
    if (kernels().empty()) return;
    check_settle();
    size_t width = 8;
    for (auto& x : kernels()) width = std::max(width, x.first.size());
    fprintf(f, "%-*s %8s %11s %7s %11s %7s %8s %8s %9s\n", (int)width, "counters", "launches", "KiB read", "a byte",
            "KiB written", "a byte", "sectors", "passes", "mma");
    for (auto& x : kernels()) {
        const Launches& k = x.second;
        fprintf(f, "%-*s %8ld %11.1f %7.2f %11.1f %7.2f %8s %8s %9ld\n", (int)width, x.first.c_str(), k.launches,
                (double)k.read / 1024, (double)k.read / std::max(k.read_footprint, 1.0), (double)k.written / 1024,
                (double)k.written / std::max(k.write_footprint, 1.0), over_least(x.first, false).c_str(),
                over_least(x.first, true).c_str(), k.mma);
    }
    fprintf(f, "(a byte: how often it is asked for; sectors of global and passes over shared memory: over the least)\n");
}

// Tab-separated, to $EMU_COUNT_OUT or standard error; dev/emu/emucount makes a table of it.
void count_print() {
    if (kernels().empty() || !options().count) return;
    FILE* f = count_open();
    for (auto& x : kernels()) {
        const Launches& k = x.second;
        fprintf(f, "kernel\t%s\t%ld\t%ld\t%.0f\t%ld\t%.0f\t%ld\n", x.first.c_str(), k.launches, k.read,
                k.read_footprint, k.written, k.write_footprint, k.mma);
    }
    for (auto& x : lines()) {
        const Line& u = x.second;
        fprintf(f, "line\t%s\t%s\t%s\t%s\t%d\t%ld\t%.2f\t%.3f\t%.3f\n", std::get<0>(x.first).c_str(),
                std::get<1>(x.first).c_str(), std::get<2>(x.first) ? "shared" : "global",
                std::get<3>(x.first) ? "store" : "load", u.width, u.requests, (double)u.lanes / (double)u.requests,
                (double)u.got / (double)u.requests, (double)u.ideal / (double)u.requests);
    }
    if (f != stderr) fclose(f);
}

}
