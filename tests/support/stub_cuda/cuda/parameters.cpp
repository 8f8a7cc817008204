// Parameters of Triton's kernels: their sizes as the compiled code lists them, and what the last launch passed.
#include "state.h"

#include <elf.h>

#include <cstdio>
#include <cstring>

namespace stub {

namespace {

constexpr int kWithSize = 4, kParameter = 0x17;  // of an entry in `.nv.info.NAME`: its format, what it is about
const std::string kSection = ".nv.info.";

thread_local bool noted = false;
thread_local std::string last;

std::vector<size_t> sizes_in(const char *entry, const char *end) {
    std::vector<size_t> sizes;
    while (entry < end) {
        uint16_t bytes;
        memcpy(&bytes, entry + 2, sizeof bytes);
        if (entry[0] == kWithSize && entry[1] == kParameter) {
            uint16_t place;
            uint32_t flags;
            memcpy(&place, entry + 8, sizeof place);
            memcpy(&flags, entry + 12, sizeof flags);
            if (sizes.size() <= place) sizes.resize(place + 1);
            sizes[place] = flags >> 18;
        }
        entry += 4 + (entry[0] == kWithSize ? bytes : 0);
    }
    return sizes;
}

}  // namespace

ParameterSizes parameter_sizes(const void *image) {
    ParameterSizes found;
    const auto *start = static_cast<const char *>(image);
    if (memcmp(start, ELFMAG, SELFMAG)) return found;
    const auto *header = static_cast<const Elf64_Ehdr *>(image);
    const auto *sections = reinterpret_cast<const Elf64_Shdr *>(start + header->e_shoff);
    const char *names = start + sections[header->e_shstrndx].sh_offset;
    for (int i = 0; i < header->e_shnum; i++) {
        const std::string name = names + sections[i].sh_name;
        const char *entries = start + sections[i].sh_offset;
        if (name.rfind(kSection, 0) == 0)
            found[name.substr(kSection.size())] = sizes_in(entries, entries + sections[i].sh_size);
    }
    return found;
}

void note_launch(const std::string &name, const Shape &shape, const std::vector<size_t> &sizes, void **parameters) {
    if (!noted) return;
    std::string text = name;
    char part[24];
    for (size_t number : shape) text += (snprintf(part, sizeof part, " %zu", number), part);
    for (size_t i = 0; i < sizes.size(); i++) {
        text += '\n';
        for (size_t byte = 0; byte < sizes[i]; byte++)
            text += (snprintf(part, sizeof part, "%02x", static_cast<unsigned char *>(parameters[i])[byte]), part);
    }
    last = text;
}

}  // namespace stub

// Of this thread, from now on; what was noted is gone.
EXPORT void stub_cuda_note_launches(bool wanted) {
    stub::noted = wanted;
    stub::last.clear();
}

// This thread's last launch of a kernel of Triton's: its name and shape, then a line for each parameter's bytes. Valid
// until its next one.
EXPORT const char *stub_cuda_last_launch() { return stub::last.c_str(); }
