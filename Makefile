# make train   make board   make test   make lint   make bench     ARGS="..." goes to the command
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
INSTALLED_BOARD := $(VENV)/.installed-board

# a test a core, of one thread; the tests of a file stay together and share what it has built
SIDE_BY_SIDE := --numprocesses=logical --maxprocesses=4 --dist=loadfile
SHUFFLED = --random-order --random-order-seed=$(ORDER)

# what is said, in the language of the system: NAME_en, NAME_zh
LANGUAGE_HERE := $(if $(filter zh%,$(firstword $(LC_ALL) $(LC_MESSAGES) $(LANG))),zh,en)
CPU_TORCH := PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
GOAL = $(or $(MAKECMDGOALS),train)
MIRROR := PIP_INDEX_URL=https://pypi.tuna.tsinghua.edu.cn/simple
INSTALLING_en = installing $< into $(VENV), once: some minutes, about 0.3 GB to download, 1.2 GB on disk. On Linux several GB of CUDA libraries come along; without a GPU leave them out: $(CPU_TORCH) make $(GOAL). From a mirror: $(MIRROR) make $(GOAL)
INSTALLING_zh = 正在把 $< 安装到 $(VENV)，只需一次：几分钟，下载约 0.3 GB，占磁盘约 1.2 GB。Linux 上还会带上几 GB 的 CUDA 库；没有 GPU 可以不装：$(CPU_TORCH) make $(GOAL)。国内可用镜像：$(MIRROR) make $(GOAL)
MORE_en = installing $< into $(VENV)
MORE_zh = 正在把 $< 安装到 $(VENV)
OLD_PYTHON_en = Python 3.10 or newer is needed; name one: make PYTHON=python3.11
OLD_PYTHON_zh = 需要 Python 3.10 或更高版本；请指定一个：make PYTHON=python3.11
INTEL_MAC_en = Intel Macs are not supported: torch wheels for them end at 2.2.2, and 2.9 is needed; a Mac with Apple silicon and an arm64 Python is
INTEL_MAC_zh = 不支持 Intel 芯片的 Mac：torch 为它们提供的安装包止于 2.2.2，而这里需要 2.9；请用 Apple 芯片的 Mac 和 arm64 的 Python
NO_VENV_en = venv is missing; on Debian and Ubuntu: apt install python3-venv
NO_VENV_zh = 缺少 venv；Debian 和 Ubuntu 请运行：apt install python3-venv

# another number, another order of the tests: make test ORDER=7
ORDER ?= 1

define HELP_en
make train   install what is missing, train a small model that reads dates; ARGS="--train_file=my.parquet --memory_budget=6G"
make board   a page in the browser: plan, start, follow and compare runs, chat with the models; ARGS="--port=8300"
make test    run the tests; ARGS="tests/model -k loss"; ORDER=7 for another order
make gpu-check   does a GPU compute what the CPU does, and in the memory planned; ARGS="-k attention"
make coverage   the tests, and the lines that none of them runs
make audit   known vulnerabilities in the packages used
make lint    ruff and mypy
make docs    the pages of docs/ as a site
make bench   speed and memory beside Hugging Face T5; ARGS="--help"
endef
define HELP_zh
make train   安装缺少的包，训练一个读日期的小模型；ARGS="--train_file=my.parquet --memory_budget=6G"
make board   浏览器里的页面：规划、启动、查看和比较训练，与模型对话；ARGS="--port=8300"
make test    运行测试；ARGS="tests/model -k loss"；ORDER=7 换一种顺序
make gpu-check   检查 GPU 的计算是否与 CPU 一致、内存是否符合规划；ARGS="-k attention"
make coverage   运行测试，并列出没有测试到的行
make audit   所用包的已知漏洞
make lint    ruff 和 mypy
make docs    把 docs/ 的页面做成网站
make bench   与 Hugging Face T5 比较速度和内存；ARGS="--help"
endef
export HELP_en HELP_zh

.PHONY: help train test lint bench board coverage audit docs gpu-check
.SILENT:

help:
	echo "$$HELP_$(LANGUAGE_HERE)"

train: $(INSTALLED)
	$(PY) train_low_mem.py $(if $(strip $(ARGS)),train $(ARGS),demo)

board: $(INSTALLED_BOARD)
	$(PY) train_low_mem.py board $(ARGS)

gpu-check: $(INSTALLED_DEV)
	$(PY) -m pytest -m "cuda or mps" -rs $(ARGS)

test: $(INSTALLED_DEV)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(SIDE_BY_SIDE) $(SHUFFLED) $(ARGS)

coverage: export COVERAGE_FILE = $(CURDIR)/data/cache/coverage/data
coverage: $(INSTALLED_DEV)
	mkdir -p data/cache/coverage
	$(PY) -m coverage erase
	OMP_NUM_THREADS=1 $(PY) -m coverage run -m pytest $(SIDE_BY_SIDE) $(SHUFFLED) $(ARGS)
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage report

lint: $(INSTALLED_DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check --quiet . || { echo 'run: $(PY) -m ruff format .'; exit 1; }
	$(PY) -m mypy

# known vulnerabilities in the packages of constraints.txt; asks pypi.org, and fails where that does not answer
audit: $(PY)
	test -x .audit-venv/bin/pip-audit || { $(PY) -m venv .audit-venv && .audit-venv/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1; }
	.audit-venv/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip

bench: $(INSTALLED_DEV)
	$(PY) -m benchmarks.throughput $(ARGS)

# the pages of docs/ as a site, in data/cache/site
docs: $(INSTALLED_DEV)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	echo data/cache/site/index.html

$(PY):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "$(OLD_PYTHON_$(LANGUAGE_HERE))")'
	$(PYTHON) -c 'import platform, sys; sys.exit((platform.system(), platform.machine()) == ("Darwin", "x86_64") and "$(INTEL_MAC_$(LANGUAGE_HERE))")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo '$(NO_VENV_$(LANGUAGE_HERE))'; exit 1; }

# The stamps make pip run again only when the requirements have changed.
$(INSTALLED): requirements.txt constraints.txt | $(PY)
	echo '$(INSTALLING_$(LANGUAGE_HERE))'
	$(PIP) --requirement requirements.txt
	touch $@

$(INSTALLED_BOARD): requirements-board.txt requirements.txt constraints.txt | $(PY)
	echo '$(MORE_$(LANGUAGE_HERE))'
	$(PIP) --requirement requirements-board.txt
	touch $(INSTALLED) $@

$(INSTALLED_DEV): requirements-dev.txt requirements-board.txt requirements.txt constraints.txt | $(PY)
	echo '$(MORE_$(LANGUAGE_HERE))'
	$(PIP) --requirement requirements-dev.txt
	touch $(INSTALLED) $(INSTALLED_BOARD) $@
