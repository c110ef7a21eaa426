// What is known of the order of a device's work. Operators run at once, on the host's memory; what is simulated is when
// they could run: every stream has a clock that says how far each other stream's work is sure to be done before its own
// next operation. Two accesses of one address from two streams, one of them a write, are a race unless the clock of the
// later one knows of the earlier one.
//
// The threads of the host are more streams: each has a clock, as far as it is told apart (see Order::enter_thread). A copy
// between the device and pinned host memory goes on beside the host: until a thread has waited for it, the target is
// poison, and the source must stay as it is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace simulated {

using Stream = std::int64_t;
using Time = std::uint64_t;
using Clock = std::map<Stream, Time>;

constexpr Stream HOST = -1;  // all threads that are not told apart
inline thread_local Stream host = HOST;
constexpr std::size_t MOST_RACES = 200;
constexpr unsigned char POISON = 0xff;  // not a number in every floating-point format

struct Range {
    std::uintptr_t begin, end;
    bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
    bool contains(const Range& other) const { return begin <= other.begin && other.end <= end; }
};

inline Range range_of(const void* at, std::size_t num_bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(at);
    return {begin, begin + num_bytes};
}

struct Access {
    Range range;
    bool writes;
    Stream stream;
    Time time;
    std::string what;

    std::string said() const { return what + (writes ? " writes" : " reads") + " on stream " + std::to_string(stream); }
};

// Device memory that was allocated on a stream, and what was done to it since.
struct Block {
    Range range;
    Stream owner;
    std::set<Stream> recorded;  // by record_stream: the memory waits for these when it is freed
    std::vector<Access> log;
};

// An operation that was launched on a stream, or a mark of the host, and what was sure to be done before it began.
struct Launch {
    std::string what;
    Stream stream;
    Time time;
    Clock known;
};

// A copy beside the host: `values` are what it reads, `pieces` the host memory that it reads or writes.
struct Copy {
    bool to_host;
    std::vector<Range> pieces;
    std::vector<char> values;
    Stream stream;
    Time time;
};

class Order {
public:
    Stream new_stream() {
        const std::lock_guard guard(lock_);
        return ++last_stream_;
    }

    // An operation begins on a stream, after all that the host has waited for.
    void launch(Stream stream, const std::string& what) {
        const std::lock_guard guard(lock_);
        join(clocks_[stream], clocks_[host]);
        const Time time = ++clocks_[stream][stream];
        if (traces_) launches_.push_back({what, stream, time, clocks_[stream]});
    }

    // The host does something of its own.
    void mark(const std::string& what) {
        const std::lock_guard guard(lock_);
        if (traces_) launches_.push_back({what, host, 0, clocks_[host]});
    }

    void trace(bool traces) {
        const std::lock_guard guard(lock_);
        traces_ = traces;
        launches_.clear();
    }

    std::vector<std::tuple<std::string, Stream, Time, Clock>> launches() {
        const std::lock_guard guard(lock_);
        std::vector<std::tuple<std::string, Stream, Time, Clock>> found;
        for (const Launch& each : launches_) found.emplace_back(each.what, each.stream, each.time, each.known);
        return found;
    }

    // What an event that is recorded now on a stream stands for.
    Clock now(Stream stream) {
        const std::lock_guard guard(lock_);
        join(clocks_[stream], clocks_[host]);
        return clocks_[stream];
    }

    void wait(Stream stream, const Clock& event) {
        const std::lock_guard guard(lock_);
        join(clocks_[stream], event);
    }

    void host_waits(const Clock& event) {
        const std::lock_guard guard(lock_);
        host_knows(event);
    }

    // From now on, this thread of the host has the clock of that number, below HOST.
    static void enter_thread(Stream number) { host = number; }

    Clock host_clock() {
        const std::lock_guard guard(lock_);
        return clocks_[host];
    }

    void host_waits_for_stream(Stream stream) { host_waits(now(stream)); }

    void host_waits_for_all() {
        const std::lock_guard guard(lock_);
        for (const auto& [stream, clock] : Clocks(clocks_)) host_knows(clock);
    }

    // ------------------------------------------------------------------------------------------------ device memory

    // False where there is no room.
    bool allocate(const void* at, std::size_t num_bytes, Stream stream) {
        const std::lock_guard guard(lock_);
        if (held_ + num_bytes > limit_) return false;
        held_ += num_bytes;
        peak_ = std::max(peak_, held_);
        const Range range = range_of(at, num_bytes);
        // It is what earlier operations of the stream let go of: they may still use it.
        blocks_[range.begin] = Block{range, stream, {}, {Access{range, true, stream, clocks_[stream][stream], "an earlier operation"}}};
        return true;
    }

    // Memory goes back to the stream that it is from, whose next operation may be given it.
    void free(const void* at) {
        const std::lock_guard guard(lock_);
        const auto found = blocks_.find(reinterpret_cast<std::uintptr_t>(at));
        if (found == blocks_.end()) return;
        const Block& block = found->second;
        Clock known = clocks_[block.owner];
        join(known, clocks_[host]);
        for (const Access& access : block.log)
            if (access.stream != block.owner && !block.recorded.count(access.stream) && !knows(known, access))
                note("memory of stream " + std::to_string(block.owner) + " is freed while it may be in use: " +
                     access.said());
        held_ -= block.range.end - block.range.begin;
        blocks_.erase(found);
    }

    void record_stream(const void* at, Stream stream) {
        const std::lock_guard guard(lock_);
        if (Block* block = block_of(reinterpret_cast<std::uintptr_t>(at))) block->recorded.insert(stream);
    }

    void access(const void* at, std::size_t num_bytes, bool writes, Stream stream, const std::string& what) {
        if (!num_bytes) return;
        const std::lock_guard guard(lock_);
        const Range range = range_of(at, num_bytes);
        Block* block = block_of(range.begin);
        if (!block) return;
        const Clock& known = clocks_[stream];
        const Access mine{range, writes, stream, clocks_[stream][stream], what};
        std::vector<Access> kept;
        for (Access& other : block->log) {
            const bool is_ordered = other.stream == stream || knows(known, other);
            if (!is_ordered && range.overlaps(other.range) && (writes || other.writes))
                note(mine.said() + " memory that " + other.said() + ", with no event between");
            const bool is_covered = is_ordered && range.contains(other.range) && (writes || !other.writes);
            if (!is_covered) kept.push_back(std::move(other));
        }
        kept.push_back(mine);
        block->log.swap(kept);
    }

    // -------------------------------------------------------------------------------------------------- host memory

    // 0, or the number of an error, which stays until take_error.
    int pin(const void* at, std::size_t num_bytes) {
        const std::lock_guard guard(lock_);
        std::size_t total = num_bytes;
        for (const auto& [begin, range] : pinned_) total += range.end - range.begin;
        if (total > pin_limit_) {
            has_error_ = true;
            return 2;
        }
        const Range range = range_of(at, num_bytes);
        pinned_[range.begin] = range;
        return 0;
    }

    bool take_error() {
        const std::lock_guard guard(lock_);
        return std::exchange(has_error_, false);
    }

    void set_pin_limit(std::size_t num_bytes) {
        const std::lock_guard guard(lock_);
        pin_limit_ = num_bytes;
    }

    void unpin(const void* at) {
        const std::lock_guard guard(lock_);
        const auto found = pinned_.find(reinterpret_cast<std::uintptr_t>(at));
        if (found == pinned_.end()) return;
        const Range range = found->second;
        pinned_.erase(found);
        resolve([&](const Copy& copy) { return overlaps(copy, range); },
                [&](const Copy& copy) { note(said(copy) + " uses pinned memory that is given up"); });
    }

    bool is_pinned(const void* at) {
        const std::lock_guard guard(lock_);
        const auto address = reinterpret_cast<std::uintptr_t>(at);
        auto found = pinned_.upper_bound(address);
        return found != pinned_.begin() && address < (--found)->second.end;
    }

    // The device is about to read host memory, or to write it: copies to it that come before are done by then.
    void before_copy(const std::vector<Range>& pieces, bool to_host, Stream stream) {
        const std::lock_guard guard(lock_);
        const Clock known = clocks_[stream];
        resolve(
            [&](const Copy& copy) {
                return (copy.to_host || to_host) &&
                       std::any_of(pieces.begin(), pieces.end(), [&](const Range& r) { return overlaps(copy, r); });
            },
            [&](const Copy& copy) {
                if (!known_at(known, copy.stream, copy.time))
                    note(std::string("a copy ") + (to_host ? "to" : "from") + " the host on stream " +
                         std::to_string(stream) + " uses memory that " + said(copy) + " uses, with no event between");
                land(copy);
            });
    }

    // A copy beside the host has been launched: of the values `values`.
    void add_copy(bool to_host, std::vector<Range> pieces, std::vector<char> values, Stream stream) {
        const std::lock_guard guard(lock_);
        Copy copy{to_host, std::move(pieces), std::move(values), stream, clocks_[stream][stream]};
        if (to_host)
            for (const Range& piece : copy.pieces)
                std::memset(reinterpret_cast<void*>(piece.begin), POISON, piece.end - piece.begin);
        copies_.push_back(std::move(copy));
    }

    // --------------------------------------------------------------------------------------------------- what is told

    std::vector<std::string> races() {
        const std::lock_guard guard(lock_);
        return races_;
    }

    void forget_races() {
        const std::lock_guard guard(lock_);
        races_.clear();
    }

    // Bytes: held, the most that were held, and how many may be.
    std::tuple<std::size_t, std::size_t, std::size_t> memory() {
        const std::lock_guard guard(lock_);
        return {held_, peak_, limit_};
    }

    void reset_peak() {
        const std::lock_guard guard(lock_);
        peak_ = held_;
    }

    void set_limit(std::size_t num_bytes) {
        const std::lock_guard guard(lock_);
        limit_ = num_bytes;
    }

private:
    using Clocks = std::map<Stream, Clock>;

    static void join(Clock& clock, const Clock& other) {
        for (const auto& [stream, time] : other) clock[stream] = std::max(clock[stream], time);
    }

    static bool known_at(const Clock& clock, Stream stream, Time time) {
        const auto found = clock.find(stream);
        return found != clock.end() && found->second >= time;
    }

    static bool knows(const Clock& clock, const Access& access) { return known_at(clock, access.stream, access.time); }

    static bool overlaps(const Copy& copy, const Range& range) {
        return std::any_of(copy.pieces.begin(), copy.pieces.end(), [&](const Range& r) { return r.overlaps(range); });
    }

    static std::string said(const Copy& copy) {
        return std::string("a copy ") + (copy.to_host ? "to" : "from") + " the host on stream " +
               std::to_string(copy.stream);
    }

    void note(std::string race) {
        if (races_.size() < MOST_RACES) races_.push_back(std::move(race));
    }

    Block* block_of(std::uintptr_t address) {
        auto found = blocks_.upper_bound(address);
        if (found == blocks_.begin()) return nullptr;
        --found;
        return address < found->second.range.end ? &found->second : nullptr;
    }

    void host_knows(const Clock& event) {
        join(clocks_[host], event);
        const Clock& known = clocks_[host];
        resolve([&](const Copy& copy) { return known_at(known, copy.stream, copy.time); },
                [&](const Copy& copy) { land(copy); });
    }

    // Take out the copies that are `meant`, and do something with each.
    template <class Meant, class Do>
    void resolve(const Meant& meant, const Do& act) {
        std::vector<Copy> left;
        for (Copy& copy : copies_) {
            if (meant(copy)) {
                act(copy);
            } else {
                left.push_back(std::move(copy));
            }
        }
        copies_.swap(left);
    }

    // The copy is done: its target has the values, or its source still is what it was.
    void land(const Copy& copy) {
        const char* values = copy.values.data();
        for (const Range& piece : copy.pieces) {
            const std::size_t num_bytes = piece.end - piece.begin;
            if (copy.to_host) {
                std::memcpy(reinterpret_cast<void*>(piece.begin), values, num_bytes);
            } else if (std::memcmp(reinterpret_cast<void*>(piece.begin), values, num_bytes)) {
                note("host memory was changed while " + said(copy) + " may have been reading it");
                return;
            }
            values += num_bytes;
        }
    }

    std::mutex lock_;  // never held while an operator runs: what it frees may need Python's, whose holder may want this
    Clocks clocks_;
    std::map<std::uintptr_t, Block> blocks_;
    std::map<std::uintptr_t, Range> pinned_;
    std::vector<Copy> copies_;
    std::vector<std::string> races_;
    std::vector<Launch> launches_;
    bool traces_ = false, has_error_ = false;
    std::size_t pin_limit_ = std::size_t(1) << 40;
    std::size_t held_ = 0, peak_ = 0, limit_ = std::size_t(8) << 30;
    Stream last_stream_ = 0;
};

}  // namespace simulated
